// The form: what the release offers, the request that it describes, and settings that survive a reload.

import * as files from "./files.js";
import * as networks from "./networks.js";
import * as problems from "./problems.js";

const SETTINGS = "preheat.settings";
const VALUES = [
  "model", "prompt", "negative_prompt", "size", "width", "height", "scheduler", "forecast", "num_inference_steps",
  "guidance_scale", "num_images", "seed", "output_format", "strength", "resize",
];
const NUMBERS = ["width", "height", "num_inference_steps", "guidance_scale", "num_images", "seed", "strength"];
const find = (id) => document.getElementById(id);
const sizeText = ([width, height]) => `${width} x ${height}`;

export function save() {
  const settings = Object.fromEntries(VALUES.map((id) => [id, find(id).value]));
  localStorage.setItem(SETTINGS, JSON.stringify({...settings, use_refiner: find("use_refiner").checked}));
}

export function saved() {
  try {
    const settings = JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
    return typeof settings === "object" && settings !== null ? settings : {};
  } catch {
    return {};
  }
}

function setOptions(select, values) {
  select.replaceChildren(
    ...values.map((value) => {
      const option = document.createElement("option");
      option.textContent = value;
      return option;
    }),
  );
}

export function offerModels(models) {
  setOptions(find("model"), models.map((model) => model.release));
  find("model-field").hidden = models.length < 2;
  const wanted = saved().model;
  if (models.some((model) => model.release === wanted)) find("model").value = wanted;
}

// Show the choices of a release, with its defaults where nothing is saved.
export function offer(model, settings) {
  const {limits} = model;
  setOptions(find("scheduler"), model.samplers);
  const list = model.sizes.sizes;
  const multiple = model.sizes.multiple ?? 1;
  find("size-field").hidden = !list;
  for (const [index, id] of ["width", "height"].entries()) {
    find(`${id}-field`).hidden = Boolean(list);
    const min = list ? "" : Math.ceil(model.sizes.min / multiple) * multiple; // the arrows count from it
    Object.assign(find(id), {min, max: model.sizes.max ?? "", step: multiple});
    find(id).value = settings[id] || model.native_size[index];
  }
  setOptions(find("size"), (list ?? [model.native_size]).map(sizeText));
  const sizes = [...find("size").options].map((option) => option.value);
  find("size").value = sizes.includes(settings.size) ? settings.size : sizeText(model.native_size);
  find("num_inference_steps").value = settings.num_inference_steps || model.defaults.num_inference_steps;
  const guidance = settings.guidance_scale ?? "";
  find("guidance_scale").value = guidance === "" ? model.defaults.guidance_scale : guidance; // 0 is a value
  find("scheduler").value = model.samplers.includes(settings.scheduler) ? settings.scheduler : model.defaults.scheduler;
  offerForecasts(model, settings.forecast);
  Object.assign(find("num_inference_steps"), {max: limits.steps});
  Object.assign(find("guidance_scale"), {max: limits.guidance});
  Object.assign(find("num_images"), {max: limits.images});
  for (const id of ["prompt", "negative_prompt"]) find(id).dataset.max = limits.prompt_characters;
  for (const id of ["prompt", "negative_prompt", "seed", "output_format", "num_images", "strength", "resize"]) {
    if (settings[id] !== undefined) find(id).value = settings[id];
    if (find(id).selectedIndex === -1) find(id).selectedIndex = 0; // no such choice any more
  }
  find("refiner-field").hidden = !model.has_refiner;
  find("use_refiner").checked = settings.use_refiner ?? model.defaults.use_refiner;
  find("image-section").hidden = model.image_sizes === null;
  if (model.image_sizes === null) files.remove();
  networks.offer(model);
  showFit();
}

// Offer the forecasts of the chosen sampler.
export function offerForecasts(model, wanted) {
  const levels = model.forecasts?.[find("scheduler").value] ?? ["off"]; // older servers have none
  setOptions(find("forecast"), levels);
  find("forecast").value = [wanted, model.defaults.forecast].find((level) => levels.includes(level)) ?? "off";
  find("forecast-field").hidden = levels.length < 2;
}

// Show the settings of a finished image.
export function useSettings(model, settings) {
  const {width, height, seed, loras = [], negative_prompt = ""} = settings;
  offer(model, {...settings, negative_prompt, size: sizeText([width, height]), seed: String(seed)});
  networks.useLoras(loras);
  save();
}

// Offer the choice of how images are resized while there is one.
export function showFit() {
  find("resize-field").hidden = !files.hasInput() && !networks.hasControlImage();
}

// Choose the served size that is nearest to an input image, and say so if it is another one.
export function setSize(model, width, height) {
  const size = files.nearestSize(model, width, height);
  find("size").value = sizeText(size);
  [find("width").value, find("height").value] = size;
  const isOwn = size[0] === width && size[1] === height;
  find("size-note").textContent = isOwn
    ? ""
    : `The image has ${sizeText([width, height])} pixels. The size is now ${sizeText(size)}, the nearest one.`;
  showFit();
  save();
}

// Return the request that the form describes. Throws Refusal for a value that cannot be right.
export async function request(model) {
  const own = [...find("fields").querySelectorAll("[data-field] :is(input, textarea)")];
  problems.check([...own.filter((element) => !element.closest(".entry")), ...networks.usedInputs()]);
  const values = {prompt: find("prompt").value, output_format: find("output_format").value};
  if (find("negative_prompt").value) values.negative_prompt = find("negative_prompt").value;
  values.scheduler = find("scheduler").value;
  if (model.forecasts) values.forecast = find("forecast").value;
  if (model.has_refiner) values.use_refiner = find("use_refiner").checked;
  for (const id of NUMBERS) if (find(id).value !== "") values[id] = Number(find(id).value);
  if (model.sizes.sizes) [values.width, values.height] = find("size").value.split(" x ").map(Number);
  Object.assign(values, files.request(), await networks.request());
  if (!values.image) delete values.strength;
  if (values.image || values.controls) values.resize = find("resize").value;
  return values;
}
