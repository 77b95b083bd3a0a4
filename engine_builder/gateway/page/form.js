// The form: what the release offers, the request that it describes, settings that survive a reload, refused fields.

import {Refusal} from "./api.js";

const SETTINGS = "preheat.settings";
const VALUES = [
  "model", "prompt", "negative_prompt", "size", "width", "height", "scheduler", "num_inference_steps", "guidance_scale",
  "num_images", "seed", "output_format", "strength", "resize",
];
const NUMBERS = ["width", "height", "num_inference_steps", "guidance_scale", "num_images", "seed", "strength"];
const find = (id) => document.getElementById(id);

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
  setOptions(find("scheduler"), model.samplers);
  const list = model.sizes.sizes;
  find("size-field").hidden = !list;
  for (const [index, id] of ["width", "height"].entries()) {
    find(`${id}-field`).hidden = Boolean(list);
    Object.assign(find(id), {min: model.sizes.min ?? "", max: model.sizes.max ?? "", step: model.sizes.multiple ?? 1});
    find(id).value = settings[id] || model.native_size[index];
  }
  setOptions(find("size"), (list ?? [model.native_size]).map(([width, height]) => `${width} x ${height}`));
  const native = `${model.native_size[0]} x ${model.native_size[1]}`;
  const sizes = [...find("size").options].map((option) => option.value);
  find("size").value = sizes.includes(settings.size) ? settings.size : native;
  find("num_inference_steps").value = settings.num_inference_steps || model.defaults.num_inference_steps;
  find("num_inference_steps").max = model.limits.steps;
  const guidance = settings.guidance_scale ?? "";
  find("guidance_scale").value = guidance === "" ? model.defaults.guidance_scale : guidance; // 0 is a value
  find("scheduler").value = model.samplers.includes(settings.scheduler) ? settings.scheduler : model.defaults.scheduler;
  find("num_images").max = model.limits.images;
  for (const id of ["prompt", "negative_prompt", "seed", "output_format", "num_images", "strength", "resize"]) {
    if (settings[id] !== undefined) find(id).value = settings[id];
  }
  find("refiner-field").hidden = !model.has_refiner;
  find("use_refiner").checked = settings.use_refiner ?? model.defaults.use_refiner;
  find("image-section").hidden = model.image_sizes === null;
  offerNetworks("lora", model.loras, {});
  offerNetworks("control", Object.keys(model.controlnets), {types: model.controlnets});
  offerNetworks("reference", Object.keys(model.ip_adapters ?? {}), {multiple: true});
}

function input(type, label, attributes) {
  const element = document.createElement("input");
  Object.assign(element, {type, ...attributes});
  element.setAttribute("aria-label", label);
  return element;
}

function offerNetworks(kind, names, {types = {}, multiple = false}) {
  find(`${kind}-section`).hidden = names.length === 0;
  find(`${kind}s`).replaceChildren(
    ...names.map((name) => {
      const entry = document.createElement("div");
      entry.className = "entry";
      entry.dataset.name = name;
      const scale = input("number", `Scale of ${name}`, {step: 0.1, value: 1, className: "scale"});
      const label = document.createElement("label");
      label.className = "check";
      if (kind === "lora") {
        label.append(input("checkbox", `Use ${name}`, {className: "used"}), name);
        entry.append(label, scale);
        return entry;
      }
      label.append(name);
      const accept = "image/png,image/jpeg,image/webp";
      const file = input("file", `Image for ${name}`, {accept, multiple, className: "file"});
      entry.append(label, scale, file);
      if (kind === "control") {
        const canny = document.createElement("label");
        canny.className = "check";
        canny.append(input("checkbox", `Use the edges of the image for ${name}`, {className: "canny"}), "Edges");
        entry.append(canny);
        if (types[name] > 0) {
          const mode = input("number", `Type of the image for ${name}`, {min: 0, max: types[name] - 1, value: 0, className: "mode"});
          entry.append(mode);
        }
      }
      return entry;
    }),
  );
}

// Choose these LoRA adapters, each with its scale, and no others.
export function useLoras(loras) {
  const scales = Object.fromEntries(loras.map(({name, scale}) => [name, scale]));
  for (const entry of find("loras").children) {
    entry.querySelector(".used").checked = entry.dataset.name in scales;
    entry.querySelector(".scale").value = scales[entry.dataset.name] ?? 1;
  }
  find("lora-section").open ||= loras.length > 0;
}

export async function base64Of(file) {
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Refusal(`${file.name} cannot be read.`, "image"));
    reader.readAsDataURL(file);
  });
  return url.slice(url.indexOf(",") + 1);
}

// Return the request that the form describes. Throws Refusal for text that is not a number.
export async function request(model, image, mask) {
  const values = {prompt: find("prompt").value, output_format: find("output_format").value};
  if (find("negative_prompt").value) values.negative_prompt = find("negative_prompt").value;
  values.scheduler = find("scheduler").value;
  if (model.has_refiner) values.use_refiner = find("use_refiner").checked;
  for (const id of NUMBERS) {
    const element = find(id);
    if (element.validity.badInput) throw new Refusal("Type a number.", id);
    if (element.value !== "") values[id] = Number(element.value);
  }
  if (model.sizes.sizes) [values.width, values.height] = find("size").value.split(" x ").map(Number);
  if (image) {
    values.image = image;
    values.resize = find("resize").value;
    if (mask) Object.assign(values, {masks: [{image: mask}], composite: true});
  } else {
    delete values.strength;
  }
  const loras = [...find("loras").children].filter((entry) => entry.querySelector(".used").checked);
  if (loras.length) values.loras = loras.map((entry) => ({name: entry.dataset.name, scale: scaleOf(entry)}));
  const controls = [];
  for (const entry of find("controls").children) {
    const file = entry.querySelector(".file").files[0];
    if (!file) continue;
    const control = {name: entry.dataset.name, scale: scaleOf(entry), image: await base64Of(file)};
    if (entry.querySelector(".canny").checked) control.preprocess = "canny";
    if (entry.querySelector(".mode")) control.mode = Number(entry.querySelector(".mode").value);
    controls.push(control);
  }
  if (controls.length) values.controls = controls;
  const references = [];
  for (const entry of find("references").children) {
    const files = [...entry.querySelector(".file").files];
    const images = await Promise.all(files.map(base64Of));
    if (files.length) references.push({name: entry.dataset.name, scale: scaleOf(entry), images});
  }
  if (references.length) values.ip_adapters = references;
  return values;
}

function scaleOf(entry) {
  return Number(entry.querySelector(".scale").value);
}

export function clearProblems() {
  for (const element of document.querySelectorAll(".problem")) element.remove();
  for (const element of document.querySelectorAll("[aria-invalid]")) element.removeAttribute("aria-invalid");
  find("error").hidden = true;
}

// Show an error at its field, or below the form if it has none.
export function showProblem(error) {
  const name = (error.field ?? "").split(".")[0];
  const field = [...document.querySelectorAll(`[data-field]`)].find(
    (element) => element.dataset.field === name && !element.hidden,
  );
  if (!field) {
    find("error").textContent = error.message;
    find("error").hidden = false;
    return;
  }
  const problem = document.createElement("p");
  problem.className = "problem";
  problem.id = "problem";
  problem.setAttribute("role", "alert");
  problem.textContent = error.message;
  field.append(problem);
  field.closest("details")?.setAttribute("open", "");
  const control = field.querySelector("input, select, textarea, canvas");
  if (!control) return;
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-describedby", "problem");
  control.focus();
}
