// The lanes of one run: blocks over time, and in them the tokens.
class Lanes {
  constructor(run, links) {
    this.run = run;
    this.links = links;
    this.blocks = []; // [element, begin, end, cells in its longest row; 0 for a wait]
    this.marks = []; // [element, moment]
    this.box = element("div", "lanes");
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "group");
    this.box.setAttribute("aria-label", `${run.policy}: target, draft and branches over time. Plus and minus zoom, arrows move, 0 shows everything`);
    this.axis = this.lane("", "axis", 1, 20);
    this.tracks = {
      target: this.lane(LANES.target, "", 1, 26),
      draft: this.lane(LANES.draft, "", 1, 22),
      branches: this.lane(LANES.branches, "", Math.max(1, ...run.blocks.filter((b) => b.lane === "branches").map((b) => b.rows.length)), 18),
    };
    if (!run.stats.num_draft_tokens) for (const name of ["draft", "branches"]) this.tracks[name].parentElement.remove();
    run.blocks.forEach((block) => this.addBlock(block));
    run.result_times.forEach((moment) => this.addResult(moment));
    if (run.waits.length) this.addWaits();
  }

  lane(label, name, rows, height) {
    const lane = element("div", `lane ${name}`);
    const track = element("div", "track");
    track.style.setProperty("--row", `${height}px`);
    track.style.height = `${rows * (height + 1) + 3}px`;
    lane.append(element("span", "label", label), track);
    this.box.append(lane);
    return track;
  }

  addBlock(block) {
    const made = element("div", "block");
    const rows = block.rows.length ? block.rows : [[]];
    for (const indices of rows) {
      const row = element("div", "row");
      if (block.name === "read the prompt") row.append(element("span", "cell prompt", "prompt"));
      for (const index of indices) row.append(this.drafted(index));
      if (block.gives !== null && block.gives !== undefined) row.append(this.own(block.gives));
      made.append(row);
    }
    this.links.describe(made, () => work(block));
    this.tracks[block.lane].append(made);
    this.blocks.push([made, block.begin, block.end, Math.max(...[...made.children].map((row) => row.children.length))]);
  }

  drafted(index) {
    const token = this.run.drafted[index];
    const cell = element("span", `cell ${FATES[token.fate]}`, visible(token.text));
    this.links.join(cell, `d${index}`);
    return cell;
  }

  own(index) {
    const cell = element("span", "cell own", visible(this.run.committed[index].text));
    this.links.join(cell, `c${index}`);
    return cell;
  }

  addResult(moment) {
    for (const track of Object.values(this.tracks)) {
      const mark = element("div", "result");
      track.append(mark);
      this.marks.push([mark, moment]);
    }
  }

  addWaits() {
    const track = this.lane("target waits\ndraft waits", "waits", 2, 12);
    for (const wait of this.run.waits) {
      const made = element("div", "block wait");
      const who = wait.lane === "target" ? "The target waited for the draft" : "The draft waited for the target";
      made.style.top = wait.lane === "target" ? "2px" : "15px";
      made.style.height = "10px";
      this.links.describe(made, () => `${who} for ${duration(wait.end - wait.begin)}`);
      track.append(made);
      this.blocks.push([made, wait.begin, wait.end, 0]);
    }
  }

  get width() {
    return this.tracks.target.clientWidth;
  }

  /** Put everything where it belongs, `scale` pixels a second, `from` at the left edge. */
  layOut(from, scale) {
    const width = this.width;
    for (const [block, begin, end, cells] of this.blocks) {
      const left = (begin - from) * scale;
      const wide = Math.max(1, (end - begin) * scale - 1);
      const hidden = left > width || left + wide < 0 || (!cells && (end - begin) * scale < 1);
      block.style.display = hidden ? "none" : "";
      if (hidden) continue;
      block.style.left = `${left}px`;
      block.style.width = `${wide}px`;
      block.classList.toggle("narrow", wide / Math.max(1, cells) < 18);
      block.classList.toggle("small", wide < 64);
      block.classList.toggle("hair", wide / Math.max(1, cells) < 5);
    }
    for (const [mark, moment] of this.marks) mark.style.left = `${(moment - from) * scale}px`;
    this.layOutAxis(from, scale, width);
  }

  layOutAxis(from, scale, width) {
    const rough = 90 / scale;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
    const ticks = [];
    for (let i = Math.max(0, Math.floor(from / step)); i * step < from + width / scale; i++) {
      const tick = element("span", "", `${Number((i * step * 1000).toPrecision(6))} ms`);
      tick.style.left = `${(i * step - from) * scale}px`;
      ticks.push(tick);
    }
    this.axis.replaceChildren(...ticks);
  }
}
