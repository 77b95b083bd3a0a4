// The input image: a chosen, dropped or pasted file, or an image of the gallery. And the size that fits it.

import {Refusal} from "./api.js";
import {Painter} from "./mask.js";
import * as problems from "./problems.js";

const find = (id) => document.getElementById(id);
const painter = new Painter(find("mask"), find("brush"));
let input = null; // base64 of a file

export async function base64Of(file) {
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Refusal(`${file.name} cannot be read.`, "image"));
    reader.readAsDataURL(file);
  });
  return url.slice(url.indexOf(",") + 1);
}

// Return the request's fields of the input image and the mask.
export function request() {
  if (!input) return {};
  const mask = painter.result();
  return {image: input, ...(mask && {masks: [{image: mask}], composite: true})};
}

// Use a `data:` URL or a Blob's. Calls `onSize` with the image's width and height.
export async function setInput(url, onSize) {
  const image = new Image();
  image.src = url;
  try {
    await image.decode();
  } catch {
    remove();
    problems.show(new Refusal("The browser cannot read this file. Choose a PNG, JPEG or WebP image.", "image"));
    return;
  }
  problems.clear();
  input = url.slice(url.indexOf(",") + 1);
  painter.load(image);
  find("painter").hidden = false;
  find("image-section").open = true;
  onSize(image.naturalWidth, image.naturalHeight);
}

export async function setFile(file, onSize) {
  try {
    await setInput(`data:${file.type};base64,${await base64Of(file)}`, onSize);
  } catch (error) {
    problems.show(error);
  }
}

export function remove() {
  input = null;
  find("image").value = "";
  find("size-note").textContent = "";
  if (find("painter").contains(document.activeElement)) find("image").focus();
  find("painter").hidden = true;
}

export function clearPaint() {
  painter.clear();
}

export function hasInput() {
  return input !== null;
}

// Return the served size [width, height] for an input image: its own, else the nearest in shape, of about the native
// area.
export function nearestSize({sizes, image_sizes, native_size}, width, height) {
  const nativeArea = native_size[0] * native_size[1];
  const listed = image_sizes.sizes ?? sizes.sizes;
  if (listed) {
    const distance = ([w, h]) => {
      if (w === width && h === height) return -1;
      return Math.abs(Math.log((w * height) / (h * width))) + 0.01 * Math.abs(Math.log((w * h) / nativeArea));
    };
    return [...listed].sort((one, other) => distance(one) - distance(other))[0];
  }
  const {min, max, multiple} = image_sizes;
  const smallest = Math.ceil(min / multiple) * multiple;
  const largest = Math.floor(max / multiple) * multiple;
  const nearest = (side) => Math.min(largest, Math.max(smallest, Math.round(side / multiple) * multiple));
  if (nearest(width) === width && nearest(height) === height) return [width, height];
  const scale = Math.min(Math.sqrt(nativeArea / (width * height)), max / Math.max(width, height));
  return [nearest(width * scale), nearest(height * scale)];
}
