// The images: those of the newest request first, in the order of their seeds. And the dialog that shows one of them.
// All texts are set as textContent.

const find = (id) => document.getElementById(id);
const MAX_IMAGES = 200; // older ones are dropped
const results = new WeakMap(); // by list item, of finished images
let shown = null; // the list item of the dialog

function element(name, className, text = "") {
  const created = document.createElement(name);
  created.className = className;
  created.textContent = text;
  return created;
}

// The images of a request, which may still be in the making. `settings`: the request without its input images.
export class Batch {
  constructor(settings, served) {
    Object.assign(this, {settings, served, finished: 0});
    const count = settings.num_images ?? 1;
    for (const item of find("gallery").querySelectorAll(".newest")) item.classList.remove("newest");
    this.items = Array.from({length: count}, (_, index) => {
      const item = element("li", "newest pending");
      const picture = element("img", "preview");
      picture.alt = `Preview of image ${index + 1} of ${count}`;
      picture.hidden = true;
      const frame = element("div", "frame");
      if (settings.width && settings.height) frame.style.aspectRatio = settings.width / settings.height;
      frame.append(picture);
      item.append(frame, element("p", "help", `Image ${index + 1} of ${count}`));
      return item;
    });
    find("gallery").prepend(...this.items);
    while (find("gallery").children.length > MAX_IMAGES) find("gallery").lastChild.remove();
    find("empty").hidden = true;
    this.items[0].scrollIntoView({block: "nearest"});
  }

  // Show a preview. Servers of older versions do not state of which image.
  preview(data, index = this.items.findIndex((item) => !results.has(item))) {
    const picture = this.items[index]?.querySelector(".preview");
    if (!picture) return; // it is finished
    picture.src = `data:image/jpeg;base64,${data}`;
    picture.hidden = false;
    picture.dataset.count = Number(picture.dataset.count ?? 0) + 1;
  }

  add(image) {
    const {settings, served} = this;
    const item = this.items[image.index];
    const url = `data:image/${image.format};base64,${image.data}`;
    const own = {...settings, width: image.width, height: image.height, seed: image.seed, num_images: 1};
    results.set(item, {...image, url, settings: own, batch: this, served});
    const card = Object.assign(element("button", "card"), {type: "button"});
    const {width, height} = image;
    const picture = Object.assign(element("img", ""), {src: url, alt: settings.prompt, width, height});
    card.append(picture, element("span", "title", settings.prompt));
    card.append(element("span", "note", `seed ${image.seed}, ${image.width} x ${image.height}`));
    card.addEventListener("click", () => show(item));
    item.classList.remove("pending");
    item.replaceChildren(card);
    this.finished++;
  }

  // `done`: the last event of the stream. `warning`: what was not followed, or "".
  complete(done, warning) {
    Object.assign(this, {done, warning});
    if (!warning) return;
    for (const item of this.items) item.querySelector(".card")?.append(element("span", "warning", warning));
  }

  // End the request. What is finished stays.
  end() {
    for (const item of this.items) if (!results.has(item)) item.remove();
    find("empty").hidden = find("gallery").children.length > 0;
  }
}

export function shownResult() {
  return results.get(shown);
}

function finishedItems() {
  return [...find("gallery").children].filter((item) => results.has(item));
}

function show(item) {
  shown = item;
  const result = results.get(item);
  const {settings, served} = result;
  const {done, warning} = result.batch;
  const items = finishedItems();
  const position = items.indexOf(item);
  find("detail-title").textContent = `Image ${position + 1} of ${items.length}`;
  find("previous").setAttribute("aria-disabled", position === 0);
  find("next").setAttribute("aria-disabled", position === items.length - 1);
  find("use-image").hidden = find("image-section").hidden;
  find("detail-image").src = result.url;
  find("detail-image").alt = settings.prompt;
  find("detail-prompt").textContent = settings.prompt;
  find("detail-warnings").textContent = warning ?? "";
  const rows = [
    ["Negative prompt", settings.negative_prompt],
    ["Size", `${result.width} x ${result.height}`],
    ["Seed", result.seed],
    ["Sampler", settings.scheduler],
    ["Forecast", settings.forecast === "off" ? undefined : settings.forecast],
    ["Steps", settings.num_inference_steps],
    ["Guidance", settings.guidance_scale],
    ["Made with", settings.uses.join(", ")],
    ["Strength", settings.strength],
    ["LoRA", settings.loras?.map((lora) => `${lora.name} ${lora.scale}`).join(", ")],
    ["Flagged", result.flagged === undefined ? undefined : result.flagged ? "yes" : "no"],
    ["Release", served.release],
    ["Device", `${served.device}, ${served.runtime}`],
    ["Time", done && `${done.time.toFixed(2)} s`],
    ...Object.entries(done?.timings ?? {}).map(([stage, time]) => [`- ${stage}`, `${time.toFixed(0)} ms`]),
  ];
  find("detail-values").replaceChildren(
    ...rows
      .filter(([, value]) => value !== undefined && value !== "")
      .flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]),
  );
  find("download").href = result.url;
  find("download").download = `preheat-${result.seed}.${result.format === "jpeg" ? "jpg" : result.format}`;
  if (!find("details").open) find("details").showModal();
}

function move(distance) {
  const items = finishedItems();
  const item = items[items.indexOf(shown) + distance];
  if (item) show(item);
}

find("previous").addEventListener("click", () => move(-1));
find("next").addEventListener("click", () => move(1));
find("details").addEventListener("keydown", ({key}) => {
  if (key === "ArrowLeft" || key === "ArrowRight") move(key === "ArrowLeft" ? -1 : 1);
});
find("details").addEventListener("close", () => {
  if (!document.activeElement.closest("form")) shown.querySelector(".card")?.focus(); // it may be another one by now
});
find("close").addEventListener("click", () => find("details").close());
