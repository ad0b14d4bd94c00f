// Puts the page together.
function numbersList(run) {
  const list = element("dl", "numbers");
  for (const [name, label, value, more] of numbers(run.stats)) {
    const pair = element("div");
    const shown = element("span", "", String(value));
    shown.dataset.stat = name;
    const cell = element("dd");
    cell.append(shown, more ? element("small", "", ` ${more}`) : "");
    pair.append(element("dt", "", label), cell);
    list.append(pair);
  }
  return list;
}

function waitingLine(run) {
  const sum = (lane) => run.waits.filter((wait) => wait.lane === lane).reduce((all, wait) => all + wait.end - wait.begin, 0);
  return element("p", "waiting", `The target waited ${duration(sum("target"))} for the draft, and the draft ${duration(sum("draft"))} for the target.`);
}

function runSection(run, view) {
  const section = element("section", "run");
  section.setAttribute("aria-label", run.policy);
  const title = element("h2", "", run.policy);
  title.append(element("small", "", `${run.result_times.length} rounds in ${duration(run.seconds)}`));
  const links = new Links(run, view);
  const lanes = new Lanes(run, links);
  view.lanes.push(lanes);
  view.attach(lanes, links);
  const text = textPanel(run, links);
  text.addEventListener("pointermove", (event) => links.point(event.target));
  text.addEventListener("pointerleave", () => links.point(document.body));
  document.addEventListener("keydown", (event) => event.key === "Escape" && links.pinned && links.pin(links.pinned));
  section.append(title, numbersList(run), lanes.box, links.detail, text);
  if (run.waits.length) section.append(waitingLine(run));
  const slowed = run.stats.slowed_by;
  if (slowed) section.append(element("p", "waiting", `Recorded step by step from the host (${slowed}): slower than an unwatched generation.`));
  return section;
}

/** Wide enough that the tokens of a usual block can be read. */
function readableScale(runs, width) {
  const cell = Math.min(34, 18 + width / 70);
  const usual = (b) => b.forwards && b.rows.length && b.rows[0].length; // a lookup takes almost no time
  const wide = runs.flatMap((run) => run.blocks.filter(usual).map((b) => (cell * (b.rows[0].length + (b.lane === "target"))) / (b.end - b.begin)));
  if (!wide.length) return 0;
  return wide.sort((a, b) => a - b)[Math.floor(wide.length * 0.6)];
}

function themeButton(button) {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const use = (theme) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
  };
  use(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => use(dark.matches ? "dark" : "light"));
  button.addEventListener("click", () => use(root.dataset.theme === "dark" ? "light" : "dark"));
}

const { runs } = data;
const view = new View(Math.max(...runs.map((run) => Math.max(run.seconds, ...run.blocks.map((block) => block.end)))) || 1);
themeButton(document.getElementById("theme"));
document.title = `${data.title}: ${runs.map((run) => run.policy).join(" and ")}`;
document.getElementById("subtitle").textContent = runs.map((run) => `${run.policy}: ${run.stats.new_tokens} tokens in ${run.stats.target_forwards} target passes`).join(" · ");
document.getElementById("runs").append(...runs.map((run) => runSection(run, view)));
view.attachOverview(document.getElementById("overview"), runs);
for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", () => view.does(button.dataset.do));
addEventListener("resize", () => view.set(view.from, view.scale));
view.set(0, readableScale(runs, view.width));
