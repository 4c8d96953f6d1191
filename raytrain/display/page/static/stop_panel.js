// The Stop button: asks once for confirmation, and then shows what happens until the checkpoint is there.

import { el, fill, formatNumber, printable } from "./format.js";

export class StopPanel {
  /** `stop` asks the run to stop and returns a promise; without `enabled` there is no button. */
  constructor(stop, enabled) {
    this.stop = stop;
    this.enabled = enabled;
    this.phase = "idle"; // idle, confirming, asked
    this.problem = null;
    this.button = el("button", { type: "button", class: "stop", hidden: true, click: () => this.enter("confirming") }, "Stop");
    this.element = el("div", { class: "stop-panel", hidden: true, role: "alert" });
  }

  /** Show where `state`, as the server sends it, has got to. */
  show(state, events) {
    // A run that was over and trains again has resumed: nobody has asked that attempt to stop.
    if ((state.over && this.phase === "confirming") || (this.state?.over && !state.over)) {
      this.phase = "idle";
      this.confirming = false;
    }
    this.state = state;
    this.events = events;
    this.draw();
  }

  enter(phase) {
    this.phase = phase;
    this.draw();
  }

  draw() {
    const { over, stop_reason: reason } = this.state;
    const asked = this.phase === "asked" || Boolean(reason);
    this.button.hidden = !this.enabled || over || asked || this.phase === "confirming";
    this.element.hidden = !(asked || this.phase === "confirming");
    if (asked) fill(this.element, this.steps());
    else if (this.phase === "confirming") this.confirm();
  }

  confirm() {
    if (this.confirming) return;
    this.confirming = true;
    const yes = el("button", { type: "button", class: "stop", click: () => this.ask() }, "Stop the run");
    const no = el("button", { type: "button", click: () => { this.confirming = false; this.enter("idle"); } }, "Go on training");
    fill(this.element, el("p", {}, this.problem ?? "Stop after this step? The run writes a checkpoint first, and can be resumed from it."), el("div", { class: "buttons" }, yes, no));
    yes.focus();
  }

  async ask() {
    this.confirming = false;
    this.problem = null;
    this.enter("asked");
    try {
      await this.stop();
    } catch (error) {
      this.problem = printable(error.message);
      this.enter("confirming");
    }
  }

  steps() {
    const { over, status, stop_reason: reason, result, step } = this.state;
    const stop = this.events.findLast(({ kind }) => kind === "stop_requested");
    const written = this.events.some(({ number, kind }) => stop && number > stop.number && kind === "checkpoint_written");
    const steps = [
      ["Asked to stop", true],
      [reason ? `The run knows: ${reason}` : "The run knows", Boolean(reason) || over],
      ["All workers stop after the same step", written || over],
      [result?.checkpoint ? `Checkpoint written: ${result.checkpoint}` : "Checkpoint written", written || Boolean(result?.checkpoint)],
      [over ? `The run is ${status}, after step ${formatNumber(step)}` : "The run has stopped", over],
    ];
    const next = steps.findIndex(([, done]) => !done);
    return el("ol", { class: "stop-steps" }, ...steps.map(([text, done], i) => el("li", { "data-state": done ? "done" : i === next ? "doing" : "waiting" }, text)));
  }
}
