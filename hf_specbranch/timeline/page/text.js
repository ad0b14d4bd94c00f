// The text below the lanes, and what links a token there with its cells above.
class Links {
  constructor(run, view) {
    this.run = run;
    this.view = view;
    this.elements = new Map(); // "c4" or "d17" -> elements
    this.descriptions = new WeakMap();
    this.committedAs = new Map(run.committed.flatMap((token, c) => (token.drafted === null ? [] : [[token.drafted, c]])));
    this.pinned = null;
    this.detail = element("p", "detail", "Point at a token, or at a piece of work.");
    this.detail.setAttribute("aria-live", "polite");
  }

  join(made, key) {
    made.dataset.key = key;
    if (!this.elements.has(key)) this.elements.set(key, []);
    this.elements.get(key).push(made);
  }

  describe(made, say) {
    this.descriptions.set(made, say);
  }

  /** Everything that shows the same token: in the text, in the pass that verified it, where it was drafted. */
  together(key) {
    const index = Number(key.slice(1));
    const committed = key[0] === "c" ? index : this.committedAs.get(index);
    const drafted = key[0] === "d" ? index : this.run.committed[index].drafted;
    return [[`c${committed}`], [`d${drafted}`]].flatMap(([each]) => this.elements.get(each) || []);
  }

  mark(key, name) {
    for (const list of this.elements.values()) for (const each of list) each.classList.remove(name);
    if (key) for (const each of this.together(key)) each.classList.add(name);
  }

  tell(key) {
    const index = Number(key.slice(1));
    const token = key[0] === "c" ? this.run.committed[index] : this.run.drafted[index];
    const committed = key[0] === "c" ? index : this.committedAs.get(index);
    const said = committed === undefined ? story(this.run, index) : origin(this.run, committed);
    this.detail.replaceChildren(element("code", "", visible(token.text)), document.createTextNode(`  ${said}.`));
  }

  point(target) {
    const token = target.closest("[data-key]");
    this.mark(token && token.dataset.key, "linked");
    if (token) return this.tell(token.dataset.key);
    const block = target.closest(".block");
    if (block && this.descriptions.has(block)) this.detail.textContent = `${this.descriptions.get(block)()}.`;
    else if (this.pinned) this.tell(this.pinned);
  }

  pin(key) {
    this.pinned = key === this.pinned ? null : key;
    this.mark(this.pinned, "pinned");
    if (!this.pinned) return;
    this.tell(key);
    const shown = this.together(key);
    const inText = shown.find((each) => each.classList.contains("token"));
    if (inText) scrollWithin(inText.parentElement, inText);
  }

  /** Pin a token of the text and bring its cells into view. */
  pinFromText(key) {
    this.pin(key);
    const drafted = this.run.committed[Number(key.slice(1))].drafted;
    const round = this.run.committed[Number(key.slice(1))].round;
    const block = this.run.blocks.find((each) => drafted !== null && each.lane !== "target" && each.rows.some((row) => row.includes(drafted)))
      || this.run.blocks.find((each) => each.lane === "target" && each.round === round);
    if (this.pinned && block) this.view.show(block);
  }
}

function scrollWithin(box, inner) {
  const above = inner.offsetTop - box.scrollTop;
  if (above < 0 || above + inner.offsetHeight > box.clientHeight) box.scrollTop = inner.offsetTop - box.clientHeight / 2;
}

function textPanel(run, links) {
  const box = element("div", "text");
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", `The text of ${run.policy}, token by token. Arrows move from token to token, Enter pins`);
  box.append(element("span", "given", run.prompt));
  run.committed.forEach((token, index) => {
    const made = element("span", `token ${token.drafted === null ? "said" : "drafted"}`);
    const [text, end] = token.text.includes("\n") ? [token.text, element("span", "mark", "↵")] : [token.text, null];
    if (end) made.append(end);
    made.append(document.createTextNode(text));
    made.setAttribute("role", "button");
    made.setAttribute("aria-label", `${visible(token.text)}, ${origin(run, index)}`);
    made.tabIndex = index === 0 ? 0 : -1;
    links.join(made, `c${index}`);
    box.append(made);
  });
  box.addEventListener("click", (event) => {
    const token = event.target.closest(".token");
    if (token) links.pinFromText(token.dataset.key);
  });
  box.addEventListener("keydown", (event) => walk(event, box, links));
  box.addEventListener("focusin", (event) => links.point(event.target));
  return box;
}

/** One stop for the tab key; arrows go from token to token. */
function walk(event, box, links) {
  const token = event.target.closest(".token");
  if (!token) return;
  if (event.key === "Enter" || event.key === " ") {
    links.pinFromText(token.dataset.key);
    event.preventDefault();
    return;
  }
  const tokens = [...box.querySelectorAll(".token")];
  const here = tokens.indexOf(token);
  const to = { ArrowRight: here + 1, ArrowDown: here + 1, ArrowLeft: here - 1, ArrowUp: here - 1, Home: 0, End: tokens.length - 1 }[event.key];
  if (to === undefined || !tokens[to]) return;
  token.tabIndex = -1;
  tokens[to].tabIndex = 0;
  tokens[to].focus();
  event.preventDefault();
}
