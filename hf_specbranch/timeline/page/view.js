// Which part of the recording is shown: one view for all runs.
class View {
  constructor(seconds) {
    this.seconds = seconds;
    this.from = 0;
    this.scale = 1; // pixels a second
    this.lanes = [];
    this.frame = document.getElementById("frame");
    this.drawn = false;
  }

  get width() {
    return this.lanes[0].width;
  }

  get least() {
    return this.width / this.seconds; // everything is shown
  }

  set(from, scale) {
    this.scale = Math.min(Math.max(scale, this.least), 2e6);
    this.from = Math.min(Math.max(from, 0), Math.max(0, this.seconds - this.width / this.scale));
    if (this.drawn) return;
    this.drawn = true;
    requestAnimationFrame(() => {
      this.drawn = false;
      for (const lanes of this.lanes) lanes.layOut(this.from, this.scale);
      this.frame.style.left = `${(this.from / this.seconds) * 100}%`;
      this.frame.style.width = `${(this.width / this.scale / this.seconds) * 100}%`;
    });
  }

  all() {
    this.set(0, this.least);
  }

  move(share) {
    this.set(this.from + (share * this.width) / this.scale, this.scale);
  }

  zoom(factor, x = this.width / 2) {
    const scale = Math.min(Math.max(this.scale * factor, this.least), 2e6);
    this.set(this.from + x / this.scale - x / scale, scale);
  }

  /** Bring a block into view, wide enough for its tokens to be read. */
  show({ begin, end, rows }) {
    const cells = Math.max(4, ...rows.map((row) => row.length));
    const scale = Math.max(this.scale, (28 * cells) / (end - begin));
    this.set((begin + end) / 2 - this.width / scale / 2, scale);
  }

  does(name) {
    const actions = { in: () => this.zoom(1.5), out: () => this.zoom(1 / 1.5), left: () => this.move(-0.25), right: () => this.move(0.25), all: () => this.all() };
    actions[name]();
  }

  key(event) {
    const name = { "+": "in", "=": "in", "-": "out", "_": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all" }[event.key];
    if (!name || event.ctrlKey || event.metaKey || event.altKey) return;
    this.does(name);
    event.preventDefault();
  }

  /** Mouse, pen and fingers on one run's lanes. */
  attach(lanes, links) {
    const box = lanes.box;
    const place = (event) => event.clientX - lanes.tracks.target.getBoundingClientRect().left;
    const down = new Map(); // pointers that are held
    let moved = 0;
    box.addEventListener("wheel", (event) => {
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) this.move((event.deltaX || event.deltaY) / this.width);
      else if (event.deltaY > 0 && this.scale <= this.least * 1.0001) return; // nothing to zoom out of: the page scrolls
      else this.zoom(Math.exp(-event.deltaY / 400), place(event));
      event.preventDefault();
    }, { passive: false });
    box.addEventListener("pointerdown", (event) => {
      down.set(event.pointerId, place(event));
      moved = 0;
    });
    box.addEventListener("pointermove", (event) => {
      if (!down.has(event.pointerId)) return links.point(event.target);
      const before = [...down.values()];
      moved += Math.abs(place(event) - down.get(event.pointerId));
      if (moved > 4 && !box.hasPointerCapture(event.pointerId)) box.setPointerCapture(event.pointerId);
      down.set(event.pointerId, place(event));
      const after = [...down.values()];
      if (moved > 4) this.drag(before, after);
      box.classList.toggle("moving", moved > 4);
    });
    for (const name of ["pointerup", "pointercancel"]) box.addEventListener(name, (event) => {
      down.delete(event.pointerId);
      box.classList.remove("moving");
    });
    box.addEventListener("pointerleave", () => links.point(document.body));
    box.addEventListener("click", (event) => {
      const token = event.target.closest("[data-key]");
      if (token && moved <= 4) links.pin(token.dataset.key);
    });
    box.addEventListener("keydown", (event) => this.key(event));
  }

  /** One pointer moves the lanes, two stretch them. */
  drag(before, after) {
    const middle = (list) => list.reduce((sum, each) => sum + each, 0) / list.length;
    const spread = (list) => (list.length > 1 ? Math.max(12, Math.abs(list[0] - list[1])) : 1);
    this.set(this.from - (middle(after) - middle(before)) / this.scale, this.scale);
    if (after.length > 1) this.zoom(spread(after) / spread(before), middle(after));
  }

  attachOverview(box, runs) {
    runs.forEach((run, row) => {
      for (const block of run.blocks.filter((each) => each.lane === "target")) {
        const made = element("i");
        made.style.left = `${(block.begin / this.seconds) * 100}%`;
        made.style.width = `${((block.end - block.begin) / this.seconds) * 100}%`;
        made.style.top = `${(row / runs.length) * 100 + 8}%`;
        made.style.height = `${100 / runs.length - 16}%`;
        box.append(made);
      }
    });
    const go = (event) => {
      const share = (event.clientX - box.getBoundingClientRect().left) / box.clientWidth;
      this.set(share * this.seconds - this.width / this.scale / 2, this.scale);
    };
    box.addEventListener("pointerdown", (event) => {
      box.setPointerCapture(event.pointerId);
      go(event);
    });
    box.addEventListener("pointermove", (event) => event.buttons && go(event));
  }
}
