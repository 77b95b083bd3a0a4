// The playground: connects the form, the stream of a request, and the gallery.

import {describe, generate} from "./api.js";
import * as form from "./form.js";
import * as gallery from "./gallery.js";
import {Painter} from "./mask.js";

const KEY = "preheat.key"; // in the tab's own storage, which ends with it
const find = (id) => document.getElementById(id);
const painter = new Painter(find("mask"), find("brush"));
const RETRY_MILLISECONDS = 3000;
const MAX_RETRIES = 200; // each may start a replica of a deployed model
let models = [];
let retry = null; // the timer of the next attempt to connect
let attempts = 0; // to connect
let inputImage = null; // base64 of a file
let running = null; // the AbortController of the request in flight
let shown = null; // the image of the dialog

function model() {
  return models.find((known) => known.release === find("model").value);
}

async function connect() {
  clearTimeout(retry);
  const attempt = ++attempts;
  find("served").textContent = "Connecting";
  try {
    const found = await describe(find("key").value);
    if (attempt !== attempts) return; // another attempt began meanwhile
    find("key-field").hidden = !found.key_required;
    models = found.models;
    if (!models.length && found.key_required && !find("key").value) {
      find("served").textContent = "Enter an API key";
      return;
    }
    if (!models.length) {
      const isLast = attempts >= MAX_RETRIES;
      find("served").textContent = isLast ? "No server can be reached" : "No server has answered yet";
      if (!isLast) retry = setTimeout(connect, RETRY_MILLISECONDS);
      return;
    }
    form.offerModels(models);
    choose(form.saved());
  } catch (error) {
    find("served").textContent = error.message;
  }
}

function choose(settings) {
  const {release, device, runtime} = model();
  find("served").textContent = `${release} on ${device}, ${runtime}`;
  form.offer(model(), settings);
  if (model().image_sizes === null) removeInput();
}

function setInput(url) {
  const image = new Image();
  image.onload = () => {
    inputImage = url.slice(url.indexOf(",") + 1);
    painter.load(image);
    find("painter").hidden = false;
    find("image-section").open = true;
  };
  image.onerror = () => form.showProblem({message: "This file is not an image.", field: "image"});
  image.src = url;
}

function removeInput() {
  inputImage = null;
  find("image").value = "";
  find("painter").hidden = true;
}

function setRunning(isRunning) {
  find("generate").disabled = isRunning;
  find("live").hidden = !isRunning;
  find("preview").hidden = true;
  find("empty").hidden = isRunning || find("gallery").children.length > 0;
  find("progress").removeAttribute("value");
  find("status").textContent = "Sending";
  if (isRunning) find("live").scrollIntoView({block: "nearest"});
}

async function submit() {
  if (running) return;
  form.clearProblems();
  form.save();
  if (!model()) {
    await connect();
    if (!model()) return;
  }
  running = new AbortController();
  setRunning(true);
  try {
    await run(model(), running.signal);
  } catch (error) {
    if (error.name !== "AbortError") form.showProblem(error);
  }
  running = null;
  setRunning(false);
}

async function run(served, signal) {
  const request = await form.request(served, inputImage, painter.result());
  const {image, masks, controls, ip_adapters, ...settings} = request;
  const steps = request.num_inference_steps ?? served.defaults.num_inference_steps;
  const preview_every = served.safety === "blank" ? 0 : Math.max(1, Math.round(steps / 10));
  const images = [];
  let doneSteps = 0;
  for await (const event of generate({...request, preview_every}, served.release, find("key").value, signal)) {
    if (event.event === "accepted" || event.event === "heartbeat") {
      if (doneSteps === 0) find("status").textContent = event.ahead ? `Waiting behind ${event.ahead} images` : "Starting";
    } else if (event.event === "step") {
      doneSteps = Math.max(doneSteps, event.step);
      Object.assign(find("progress"), {max: event.steps, value: doneSteps});
      find("status").textContent = `Step ${doneSteps} of ${event.steps}`;
      if (event.preview) {
        find("preview").src = `data:image/jpeg;base64,${event.preview}`;
        find("preview").hidden = false;
        find("preview").dataset.count = Number(find("preview").dataset.count ?? 0) + 1;
      }
    } else if (event.event === "image") {
      images.push(event);
    } else if (event.event === "done") {
      for (const image of images) gallery.add(image, settings, event, served.device, open);
    }
  }
}

function open(result) {
  shown = result;
  find("use-image").hidden = find("image-section").hidden;
  gallery.show(result);
}

find("form").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
find("form").addEventListener("change", form.save);
find("form").addEventListener("input", form.save);
document.addEventListener("keydown", (event) => {
  if (find("details").open) return; // Escape closes the dialog
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit();
  if (event.key === "Escape") running?.abort();
});
find("cancel").addEventListener("click", () => running?.abort());
find("clear-seed").addEventListener("click", () => {
  find("seed").value = "";
  form.save();
});
find("model").addEventListener("change", () => choose({prompt: find("prompt").value}));
find("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, find("key").value);
  connect();
});
find("image").addEventListener("change", async () => {
  const file = find("image").files[0];
  form.clearProblems();
  if (file) setInput(`data:${file.type};base64,${await form.base64Of(file)}`);
});
find("remove-image").addEventListener("click", removeInput);
find("clear-mask").addEventListener("click", () => painter.clear());
find("close").addEventListener("click", () => find("details").close());
find("use-image").addEventListener("click", () => {
  setInput(shown.url);
  find("details").close();
});
find("use-settings").addEventListener("click", () => {
  const {settings} = shown;
  find("model").value = shown.done.engine.release;
  choose({}); // its release may be another one
  form.offer(model(), {...settings, size: `${settings.width} x ${settings.height}`, seed: String(settings.seed)});
  form.useLoras(settings.loras ?? []);
  find("negative_prompt").value = settings.negative_prompt ?? "";
  form.save();
  find("details").close();
  find("prompt").focus();
});

find("key").value = sessionStorage.getItem(KEY) ?? "";
connect();
