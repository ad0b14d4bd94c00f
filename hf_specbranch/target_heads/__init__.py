"""Drafts that read the target's hidden states: EAGLE-3 drafts, and layers that come with a checkpoint.

`base.TargetHead` is what they have in common, `loading.load_head` finds and loads them.
"""
