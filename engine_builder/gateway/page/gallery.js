// Finished images, the newest first, and the dialog that shows one of them. All texts are set as textContent.

const find = (id) => document.getElementById(id);
const MAX_IMAGES = 200; // older ones are dropped

// `settings`: the request without its input images. `done`: the last event of the stream.
export function add(image, settings, done, device, open) {
  const url = `data:image/${image.format};base64,${image.data}`;
  const result = {...image, url, settings: {...settings, seed: image.seed, num_images: 1}, done, device};
  const card = document.createElement("button");
  card.type = "button";
  card.className = "card";
  const picture = document.createElement("img");
  picture.src = url;
  picture.alt = settings.prompt;
  const title = document.createElement("span");
  title.textContent = settings.prompt;
  const note = document.createElement("span");
  note.textContent = `seed ${image.seed}, ${image.width} x ${image.height}`;
  card.append(picture, title, note);
  card.addEventListener("click", () => open(result));
  find("gallery").prepend(card);
  while (find("gallery").children.length > MAX_IMAGES) find("gallery").lastChild.remove();
  find("empty").hidden = true;
}

export function show(result) {
  const {settings, done} = result;
  find("detail-image").src = result.url;
  find("detail-image").alt = settings.prompt;
  find("detail-prompt").textContent = settings.prompt;
  const rows = [
    ["Negative prompt", settings.negative_prompt],
    ["Size", `${result.width} x ${result.height}`],
    ["Seed", result.seed],
    ["Sampler", settings.scheduler],
    ["Steps", settings.num_inference_steps],
    ["Guidance", settings.guidance_scale],
    ["LoRA", settings.loras?.map((lora) => `${lora.name} ${lora.scale}`).join(", ")],
    ["Flagged", result.flagged === undefined ? undefined : result.flagged ? "yes" : "no"],
    ["Warnings", done.warnings.join(" ")],
    ["Release", done.engine.release],
    ["Device", `${result.device}, ${done.engine.runtime}`],
    ["Time", `${done.time.toFixed(2)} s`],
    ...Object.entries(done.timings).map(([stage, milliseconds]) => [`- ${stage}`, `${milliseconds.toFixed(0)} ms`]),
  ];
  find("detail-values").replaceChildren(
    ...rows
      .filter(([, value]) => value !== undefined && value !== "")
      .flatMap(([name, value]) => {
        const term = document.createElement("dt");
        const text = document.createElement("dd");
        term.textContent = name;
        text.textContent = value;
        return [term, text];
      }),
  );
  find("download").href = result.url;
  find("download").download = `preheat-${result.seed}.${result.format === "jpeg" ? "jpg" : result.format}`;
  find("details").showModal();
}
