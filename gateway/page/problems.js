// Refused fields and other errors: in words for people, at the field, and once more above the button.

import {Refusal} from "./api.js";

const find = (id) => document.getElementById(id);
const CONTROLS = "input, select, textarea, canvas";
const FIELDS = {n: "num_images", size: "width", composite: "masks"}; // the gateway's names -> the page's
// What to say in place of the gateway's message, by its name of the cause.
const WORDS = {
  invalid_api_key: () => (find("key").value ? "This API key is not accepted." : "Enter an API key."),
  too_large: () => "The images have too many bytes: at most 32 MiB each, and about 48 MiB together.",
  overloaded: () => "The server is busy.",
  rate_limit_exceeded: (message) => message.replace(/^n: /, "").replace(/ Repeat the request .*/, ""),
  model_not_found: () => "The server no longer serves this release. Check the settings, and generate again.",
  release_changed: () => "The server no longer serves this release. Check the settings, and generate again.",
  backend_unavailable: () => "Nothing was generated. Generate again when the server is back.",
  backend_failed: () => "The server failed before the images were finished. Generate again.",
  backend_refused: () => "The server refuses the gateway's own API key. Whoever runs the gateway has to change it.",
  unreachable: () => "The gateway does not answer: it has ended, or the network is interrupted.",
};
const FIELD_OF_KIND = {invalid_api_key: () => "key", too_large: largestFile};

// True if people can reach it: it may be in a closed <details>, but in nothing hidden.
function isOffered(element) {
  return !element.closest("[hidden]");
}

function fieldNamed(name) {
  return [...document.querySelectorAll(`[data-field~="${CSS.escape(name)}"]`)].find(isOffered);
}

// Return the element of a path such as loras.0.scale, or of the longest part of it that has one.
function elementOf(path) {
  const parts = (FIELDS[path] ?? path).split(".");
  for (let length = parts.length; length > 0; length--) {
    const found = fieldNamed(parts.slice(0, length).join("."));
    if (found) return found;
  }
  return null;
}

// Return the name of the field that has the largest files.
function largestFile() {
  const bytes = (input) => [...input.files].reduce((sum, file) => sum + file.size, 0);
  const [largest] = [...document.querySelectorAll("input[type=file]")].sort((one, other) => bytes(other) - bytes(one));
  return largest.closest("[data-field]").dataset.field;
}

function labelOf(element) {
  const holder = element.closest("[data-label]");
  if (holder) return holder.dataset.label;
  const label = element.closest(".field, .check")?.querySelector("label, .label") ?? element.closest("label");
  return (label ?? element.closest("details")?.querySelector("summary"))?.textContent.trim() ?? "";
}

// Return a server's text with the labels of fields in place of their names.
export function inWords(text) {
  const label = (path, otherwise) => (elementOf(path) ? labelOf(elementOf(path)) : otherwise);
  return text
    .replace(/(?<=^|\. )([a-z_][\w.]*): /g, (start, path) => `${label(path, path)}: `)
    .replace(/got (.*?), expected (.*?)(?:, or null)?\.(?= |$)/g, "$1 is not accepted. Give $2.")
    .replace(/`(\w+)`/g, (name, path) => `“${label(path, path)}”`);
}

function wordsOf(error) {
  const rewrite = WORDS[error.kind] ?? ((message) => message);
  const text = inWords(rewrite(error.message).replace(error.field ? `${error.field}: ` : "", ""));
  const wait = error.status === 429 && error.seconds ? ` Try again in ${error.seconds} s.` : "";
  return text.charAt(0).toUpperCase() + text.slice(1) + wait;
}

export function clear() {
  for (const element of document.querySelectorAll(".problem")) element.remove();
  for (const element of document.querySelectorAll("[aria-invalid]")) {
    element.removeAttribute("aria-invalid");
    element.setAttribute("aria-describedby", element.getAttribute("aria-describedby").replace(/problem ?/, ""));
  }
  find("error").hidden = true;
}

// Show an error above the button, and at its field if it has one, which gets the focus. `more`: a sentence.
export function show(error, more = "") {
  clear();
  const text = wordsOf(error);
  const element = elementOf(error.field || (FIELD_OF_KIND[error.kind]?.() ?? ""));
  const label = element ? labelOf(element) : "";
  find("error").textContent = `${label ? `${label}: ` : ""}${text} ${more}`.trim();
  find("error").hidden = false;
  if (!element) return;
  const control = element.matches(CONTROLS) ? element : element.querySelector(CONTROLS);
  const holder = element.closest(".entry, .field") ?? element;
  const problem = document.createElement("p");
  problem.className = "problem";
  problem.id = "problem";
  problem.textContent = text;
  holder.append(problem);
  for (let section = holder.closest("details"); section; section = section.parentElement.closest("details")) {
    section.open = true;
  }
  if (control) {
    control.setAttribute("aria-invalid", "true");
    control.setAttribute("aria-describedby", `problem ${control.getAttribute("aria-describedby") ?? ""}`);
    control.focus({preventScroll: true});
  }
  holder.scrollIntoView({block: "nearest"});
}

// Throw the Refusal of the first of these controls whose value cannot be right. The server checks what is left.
export function check(controls) {
  for (const control of controls) {
    const reason = isOffered(control) && reasonAgainst(control);
    if (reason) throw new Refusal(reason, control.closest("[data-field]").dataset.field);
  }
}

function reasonAgainst({validity, value, required, type, inputMode, min, max, dataset}) {
  const isText = type === "textarea";
  if (isText && required && !value.trim()) return "Describe the image.";
  const count = [...value].length;
  if (isText && count > dataset.max) return `The text has ${count} characters. At most ${dataset.max} are accepted.`;
  const isWhole = inputMode === "numeric";
  const isOutside = validity.rangeUnderflow || validity.rangeOverflow;
  const isBroken = isWhole && !Number.isInteger(Number(value));
  if (!validity.badInput && !isOutside && !isBroken && (value || !required)) return "";
  return `Give a ${isWhole ? "whole number" : "number"}${min && max ? ` from ${min} to ${max}` : ""}.`;
}
