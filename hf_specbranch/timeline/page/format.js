// How things read.
const data = JSON.parse(document.getElementById("data").textContent);
const FATES = { "accepted": "accepted", "rolled back": "rolled", "wasted": "wasted" };
const LANES = { target: "Target", draft: "Draft", branches: "Branches" };

/** An element with a class and a text; the text is never read as HTML. */
function element(tag, name = "", text = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text) made.textContent = text;
  return made;
}

/** A token as it reads inside a small cell: blanks and line ends must be seen. */
function visible(text) {
  return text.replace(/ /g, "·").replace(/\r?\n/g, "↵").replace(/\t/g, "⇥");
}

function duration(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return seconds >= 0.01 ? `${(seconds * 1000).toFixed(1)} ms` : `${(seconds * 1000).toFixed(2)} ms`;
}

function count(number, one, many = `${one}s`) {
  return `${number} ${number === 1 ? one : many}`;
}

function percent(part) {
  return `${(part * 100).toFixed(1)}%`;
}

/** What is shown of the statistics: name in the statistics, label, value, addition. */
function numbers(stats) {
  const shown = [
    ["new_tokens", "new tokens", stats.new_tokens, ""],
    ["tokens_per_second", "tokens per second", stats.tokens_per_second.toFixed(1), ""],
    ["target_forwards", "target passes", stats.target_forwards, ""],
    ["mean_acceptance_length", "tokens per pass", stats.mean_acceptance_length.toFixed(2), ""],
  ];
  if (!stats.num_draft_tokens) return shown;
  if (stats.hidden_seconds) shown.push(["hidden_fraction", "drafting hidden", percent(stats.hidden_fraction), ""]);
  const drafted = `of ${stats.num_draft_tokens} drafted`;
  return shown.concat([
    ["num_accepted_tokens", "accepted", stats.num_accepted_tokens, drafted],
    ["rollback_tokens", "rolled back", stats.rollback_tokens, drafted],
    ["wasted_branch_tokens", "wasted on branches", stats.wasted_branch_tokens, drafted],
    ["rollback_rate", "rollback rate", percent(stats.rollback_rate), ""],
    ["branch_hit_rate", "branch hits", percent(stats.branch_hit_rate), `${stats.branch_hits} of ${stats.branch_points}`],
  ]);
}

/** One drafted token's story. */
function story(run, index) {
  const token = run.drafted[index];
  const where = token.lane === "draft" ? "drafted before the pass" : token.branch ? `drafted during the pass on branch ${token.branch + 1}` : "drafted during the pass on the main branch";
  const sure = token.confidence === null ? "" : `, confidence ${token.confidence.toFixed(2)}`;
  return `${where} of round ${token.round}${sure}; ${token.fate} by the verify result of round ${token.settled}`;
}

/** One committed token's story. */
function origin(run, index) {
  const token = run.committed[index];
  const place = `token ${index + 1} of ${run.committed.length}`;
  if (token.drafted === null) return `${place}: the target's own, in round ${token.round}`;
  return `${place}: ${story(run, token.drafted)}`;
}

/** What a piece of work was. */
function work(block) {
  const cells = block.rows.reduce((sum, row) => sum + row.length, 0);
  const what = {
    target: `a target pass over ${count(cells, "drafted token")}`,
    draft: !block.forwards ? `${count(cells, "token")} looked up` : cells ? `a draft stage of ${count(cells, "token")}` : "a draft stage that stopped before its first token",
    branches: `${count(block.rows.length, "branch", "branches")} of ${count(cells, "token")} together, drafted during the pass`,
  };
  const said = block.name === "read the prompt" ? `the ${block.lane} reads the prompt` : what[block.lane];
  return `Round ${block.round}: ${said}, ${duration(block.end - block.begin)}`;
}
