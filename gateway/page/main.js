// The playground: connects the form, the server, the stream of a request, and the gallery.

import {Refusal, generate} from "./api.js";
import * as files from "./files.js";
import * as form from "./form.js";
import * as gallery from "./gallery.js";
import * as networks from "./networks.js";
import * as problems from "./problems.js";
import {Server} from "./server.js";

const BACK = "The server is back.";
const KEY = "preheat.key"; // in the tab's own storage, which ends with it
const find = (id) => document.getElementById(id);
const server = new Server(() => find("key").value, offerModels, showServer);
let running = null; // the AbortController of the request in flight

// Live regions read a text aloud each time it is set.
function setText(id, text) {
  if (find(id).textContent !== text) find(id).textContent = text;
}

function model() {
  return server.models.find((known) => known.release === find("model").value);
}

function offerModels() {
  form.offerModels(server.models);
  form.offer(model(), form.saved());
}

function showServer() {
  const {problem, isUp} = server;
  const served = model() && `${model().release} on ${model().device}, ${model().runtime}`;
  setText("served", problem || served);
  for (const id of ["served", "down"]) find(id).classList.toggle("bad", !isUp);
  find("key-field").hidden = !server.keyRequired;
  if (!isUp) setText("down", `${problem}. This page asks again every 2 seconds.`);
  else if (find("down").textContent && find("down").textContent !== BACK) {
    problems.clear(); // the server's absence is over
    setText("down", BACK);
  }
}

function setRunning(isRunning) {
  find("generate").setAttribute("aria-disabled", isRunning); // a disabled button would lose the focus
  if (!isRunning && document.activeElement === find("cancel")) find("generate").focus();
  find("cancel").hidden = !isRunning;
  find("progress").hidden = !isRunning;
  find("progress").removeAttribute("value");
}

// Show a text that is also read aloud, followed by `more`. Steps are not: they are too many.
function announce(text, more = "") {
  setText("status", text);
  setText("announced", `${text} ${more}`);
}

// Fields of a request with files, which are not kept with its settings.
const FILES = {image: "input image", masks: "mask", controls: "ControlNet", ip_adapters: "reference images"};

async function submit() {
  if (running) return;
  problems.clear();
  form.save();
  running = new AbortController();
  setRunning(true);
  announce("Sending");
  let batch = null;
  try {
    if (!model() || (server.keyRequired && !find("key").value)) await server.connect();
    const served = model();
    if (!served) throw new Refusal("No server has answered yet.");
    const request = await form.request(served);
    if (server.isUp) setText("down", "");
    const {image, masks, controls, ip_adapters, ...values} = request;
    const uses = Object.keys(FILES).filter((name) => request[name]).map((name) => FILES[name]);
    const settings = {...values, uses};
    const steps = request.num_inference_steps ?? served.defaults.num_inference_steps;
    const preview_every = served.safety === "blank" ? 0 : Math.max(1, Math.round(steps / 10));
    const started = performance.now();
    const events = generate({...request, preview_every}, served.release, find("key").value, running.signal);
    for await (const event of events) {
      if (event.event === "accepted") batch = new gallery.Batch(settings, served);
      follow(event, batch);
    }
    const seconds = ((performance.now() - started) / 1000).toFixed(1);
    announce(`${countFinished(batch)} in ${seconds} s`, batch.warning);
  } catch (error) {
    const result = batch ? `${countFinished(batch)}.` : "";
    announce(error.name === "AbortError" ? `Cancelled. ${result}` : result);
    if (error.name !== "AbortError") problems.show(error, result);
    if (error.status >= 500 || error.kind === "unreachable") server.poll();
    if (["model_not_found", "release_changed"].includes(error.kind)) server.connect().catch(() => {});
  }
  batch?.end();
  running = null;
  setRunning(false);
}

function countFinished({finished, items}) {
  const images = items.length === 1 ? "1 image" : `${items.length} images`;
  return finished === items.length ? images : `${finished} of ${images} finished`;
}

// Show an event of a request's stream.
function follow(event, batch) {
  const progress = find("progress");
  if (event.event === "accepted" || event.event === "heartbeat") {
    if (!progress.hasAttribute("value")) announce(event.ahead ? `Waiting behind ${event.ahead} images` : "Starting");
  } else if (event.event === "step") {
    const step = Math.max(event.step, progress.hasAttribute("value") ? progress.value : 0);
    Object.assign(progress, {max: event.steps, value: step});
    setText("status", `Step ${step} of ${event.steps}`);
    if (event.preview) batch.preview(event.preview, event.index);
  } else if (event.event === "image") {
    batch.add(event);
    if (batch.items.length > 1) setText("announced", countFinished(batch));
  } else if (event.event === "done") {
    batch.complete(event, event.warnings.map(problems.inWords).join(" "));
  }
}

function useFile(file) {
  if (!file) return;
  if (find("image-section").hidden) problems.show(new Refusal("This release takes no input image."));
  else files.setFile(file, (width, height) => form.setSize(model(), width, height));
}

function changed(event) {
  if (event.target.getAttribute("aria-invalid")) problems.clear();
  form.showFit();
  form.save();
}

find("form").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
find("form").addEventListener("change", changed);
find("form").addEventListener("input", changed);
document.addEventListener("keydown", (event) => {
  if (find("details").open) return; // Escape closes the dialog
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit();
  if (event.key === "Escape") running?.abort();
});
document.addEventListener("paste", ({clipboardData}) => {
  if (!clipboardData.types.includes("text/plain")) useFile(clipboardData.files[0]); // text may come with its picture
});
for (const name of ["dragover", "drop"]) {
  document.addEventListener(name, (event) => {
    if (!event.dataTransfer.types.includes("Files") || event.target.matches("input[type=file]")) return; // not for us
    event.preventDefault(); // the browser would leave the page and show the file
    if (name === "drop") useFile(event.dataTransfer.files[0]);
  });
}
find("cancel").addEventListener("click", () => running?.abort());
find("clear-seed").addEventListener("click", () => {
  find("seed").value = "";
  form.save();
});
find("model").addEventListener("change", () => {
  form.offer(model(), {prompt: find("prompt").value, negative_prompt: find("negative_prompt").value});
  showServer();
});
find("scheduler").addEventListener("change", () => {
  form.offerForecasts(model(), find("forecast-field").hidden ? undefined : find("forecast").value);
});
find("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, find("key").value);
  problems.clear();
  server.connect().catch(problems.show);
});
find("image").addEventListener("change", () => useFile(find("image").files[0]));
find("remove-image").addEventListener("click", () => {
  files.remove();
  form.showFit();
});
find("clear-mask").addEventListener("click", files.clearPaint);
find("use-image").addEventListener("click", () => {
  find("details").close();
  files.setInput(gallery.shownResult().url, (width, height) => form.setSize(model(), width, height));
});
find("use-settings").addEventListener("click", () => {
  const {settings, served} = gallery.shownResult();
  if (server.models.some(({release}) => release === served.release)) find("model").value = served.release;
  const unused = Object.keys(FILES).filter((field) => !settings.uses.includes(FILES[field]));
  if (unused.includes("image")) files.remove();
  networks.removeImages(unused);
  form.useSettings(model(), settings);
  showServer();
  find("details").close();
  find("prompt").focus();
  if (settings.uses.length) announce(`Files are not kept. Choose again: ${settings.uses.join(", ")}.`);
});

find("key").value = sessionStorage.getItem(KEY) ?? "";
server
  .connect()
  .catch(() => {}) // the header has the reason
  .finally(() => server.poll());
