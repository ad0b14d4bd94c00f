"""What older releases of transformers and torch do differently, as far as tests see it."""

import torch
import transformers

TRANSFORMERS = tuple(map(int, transformers.__version__.split(".")[:2]))
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))

# Assisted decoding of transformers with drafts of a constant length may call the draft without a token, and fails.
ASSISTED_FAILS = TRANSFORMERS < (5, 16)
# The layers for multi-token prediction fail where the caller names no processors.
MTP_LAYERS_FAIL = TRANSFORMERS < (5, 16)
# GIT takes no explicit attention mask: it is refused.
GIT_IS_REFUSED = TRANSFORMERS < (5, 18)
# Phi-3 with two sets of rotary frequencies reads only the last token again where they change: calls that get there
# fall back.
PHI3_FALLS_BACK = TRANSFORMERS < (5, 20)
# Tensor parallel loading needs a newer torch; one release does not say that a model is tensor parallel.
NO_TENSOR_PARALLEL = TRANSFORMERS == (5, 16) or TORCH < (2, 7)
# Tensor parallel loading by `tp_plan=` alone.
NO_TP_PLAN = TRANSFORMERS < (5, 17)
