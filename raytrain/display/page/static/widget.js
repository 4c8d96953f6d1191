// The page of one run as a widget of anywidget, whose state is what a page's server would send to a new viewer.

import { el, fill } from "./format.js";
import { RunView } from "./run_view.js";

/** Called by a front end for each place that shows the widget. */
export function render({ model, el: place }) {
  let view = null;
  const show = () => {
    const message = model.get("message");
    if (!message.run) return;
    if (!view) {
      view = new RunView(message.run, { stop: async () => model.send("stop") });
      fill(place, view.element);
    }
    view.apply(message);
  };
  place.classList.add("raytrain", "widget");
  fill(place, el("p", { class: "facts" }, "reading the data, starting the workers …"));
  model.on("change:message", show);
  show();
  return () => model.off("change:message", show);
}
