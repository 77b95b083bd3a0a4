// LoRA adapters, ControlNets and IP-Adapters: an entry of the form for each, and their part of a request.

import {base64Of} from "./files.js";

const find = (id) => document.getElementById(id);
const FIELDS = {loras: "lora", controls: "control", ip_adapters: "reference"}; // of a request -> the section's id
const ACCEPT = "image/png,image/jpeg,image/webp";

function input(type, key, label, attributes) {
  const element = Object.assign(document.createElement("input"), {type, className: key, ...attributes});
  element.dataset.key = key;
  element.setAttribute("aria-label", label);
  return element;
}

function labelled(className, ...parts) {
  const label = document.createElement("label");
  label.className = className;
  label.append(...parts);
  return label;
}

function entryOf(field, name, most) {
  const entry = document.createElement("div");
  entry.className = "entry";
  Object.assign(entry.dataset, {name, label: name});
  const [min, max] = field === "loras" ? [-10, 10] : [0, 2];
  const number = {required: true, step: 0.1, value: 1, min, max};
  const scale = labelled("small", "Scale ", input("number", "scale", `Scale of ${name}`, number));
  if (field === "loras") {
    entry.append(labelled("check", input("checkbox", "used", `Use ${name}`), name), scale);
    return entry;
  }
  const isControl = field === "controls";
  const choice = {accept: ACCEPT, multiple: !isControl};
  const file = input("file", isControl ? "image" : "images", `Image for ${name}`, choice);
  file.classList.add("file");
  entry.append(labelled("check", name), scale, file);
  if (!isControl) return entry;
  const canny = input("checkbox", "preprocess", `Use the edges of the image for ${name}`);
  canny.classList.add("canny");
  entry.append(labelled("check", canny, "Use its edges"));
  if (most > 0) {
    const whole = {required: true, inputMode: "numeric", value: 0, min: 0, max: most - 1};
    entry.append(labelled("small", "Type ", input("number", "mode", `Type of the image for ${name}`, whole)));
  }
  return entry;
}

// Offer the networks of a release. What is chosen stays if the same ones were offered before.
export function offer(model) {
  const offered = {
    loras: Object.fromEntries(model.loras.map((name) => [name, 0])),
    controls: model.controlnets,
    ip_adapters: model.ip_adapters ?? {},
  };
  for (const [field, networks] of Object.entries(offered)) {
    const section = find(`${FIELDS[field]}-section`);
    const holder = find(`${FIELDS[field]}s`);
    if (holder.dataset.offered === JSON.stringify(networks)) continue;
    holder.dataset.offered = JSON.stringify(networks);
    section.hidden = Object.keys(networks).length === 0;
    holder.replaceChildren(...Object.entries(networks).map(([name, most]) => entryOf(field, name, most)));
  }
}

function isUsed(entry) {
  return entry.querySelector(".used")?.checked || entry.querySelector(".file")?.files.length > 0;
}

// Return the entries that a request uses, and name their fields as the request does.
function usedEntries(field) {
  const entries = [...find(`${FIELDS[field]}s`).children].filter(isUsed);
  for (const [index, entry] of entries.entries()) {
    entry.dataset.field = `${field}.${index}`;
    for (const part of entry.querySelectorAll("[data-key]")) {
      part.dataset.field = `${entry.dataset.field}.${part.dataset.key}`;
    }
  }
  return entries;
}

// Return the inputs that a request would use.
export function usedInputs() {
  for (const part of document.querySelectorAll(".entry, .entry [data-key]")) delete part.dataset.field;
  return Object.keys(FIELDS).flatMap(usedEntries).flatMap((entry) => [...entry.querySelectorAll("input")]);
}

export function hasControlImage() {
  return [...find("controls").children].some(isUsed);
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

async function valuesOf(field, entry) {
  const values = {name: entry.dataset.name, scale: Number(entry.querySelector(".scale").value)};
  const files = await Promise.all([...(entry.querySelector(".file")?.files ?? [])].map(base64Of));
  if (field === "controls") values.image = files[0];
  if (field === "ip_adapters") values.images = files;
  if (entry.querySelector(".canny")?.checked) values.preprocess = "canny";
  const mode = entry.querySelector(".mode");
  return mode ? {...values, mode: Number(mode.value)} : values;
}

// Remove the images of ControlNets and IP-Adapters, whose fields are among `fields`.
export function removeImages(fields) {
  for (const field of fields.filter((one) => one in FIELDS)) {
    for (const file of find(`${FIELDS[field]}s`).querySelectorAll(".file")) file.value = "";
  }
}

// Return the request's fields for the networks that are used.
export async function request() {
  const values = {};
  for (const field of Object.keys(FIELDS)) {
    const entries = usedEntries(field);
    if (entries.length) values[field] = await Promise.all(entries.map((entry) => valuesOf(field, entry)));
  }
  return values;
}
