// Painting a mask over an image: with a pointer, or with the keyboard. Painted parts are white in the result.

const PAINT = "rgb(249 115 22)";

export class Painter {
  constructor(canvas, brush) {
    this.canvas = canvas;
    this.brush = brush; // an input: the radius in per cent of the longer side
    this.layer = document.createElement("canvas");
    this.image = null;
    this.last = null;
    this.cursor = null;
    this.painted = false;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.last = this.position(event);
      this.line(this.last);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (this.last) this.line(this.position(event));
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => (this.last = null));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => {
      this.cursor = null;
      this.draw();
    });
  }

  load(image) {
    this.image = image;
    for (const canvas of [this.canvas, this.layer]) {
      canvas.width = image.naturalWidth;
      canvas.height = image.naturalHeight;
    }
    this.clear();
  }

  clear() {
    this.layer.getContext("2d").clearRect(0, 0, this.layer.width, this.layer.height);
    this.painted = false;
    this.draw();
  }

  radius() {
    return Math.max(1, (Number(this.brush.value) / 100) * Math.max(this.layer.width, this.layer.height));
  }

  position(event) {
    const box = this.canvas.getBoundingClientRect();
    return [
      ((event.clientX - box.left) * this.canvas.width) / box.width,
      ((event.clientY - box.top) * this.canvas.height) / box.height,
    ];
  }

  line(to) {
    const context = this.layer.getContext("2d");
    context.strokeStyle = PAINT;
    context.lineCap = "round";
    context.lineWidth = 2 * this.radius();
    context.beginPath();
    context.moveTo(...(this.last ?? to));
    context.lineTo(...to);
    context.stroke();
    this.last = this.last && to;
    this.painted = true;
    this.draw();
  }

  key(event) {
    const moves = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
    const move = moves[event.key];
    if (!move && event.key !== " ") return;
    event.preventDefault();
    const [x, y] = this.cursor ?? [this.canvas.width / 2, this.canvas.height / 2];
    const [right, down] = move ?? [0, 0];
    const stride = this.radius();
    this.cursor = [
      Math.min(this.canvas.width, Math.max(0, x + right * stride)),
      Math.min(this.canvas.height, Math.max(0, y + down * stride)),
    ];
    if (event.key === " ") this.line(this.cursor);
    else this.draw();
  }

  draw() {
    if (!this.image) return;
    const context = this.canvas.getContext("2d");
    context.drawImage(this.image, 0, 0);
    context.globalAlpha = 0.6;
    context.drawImage(this.layer, 0, 0);
    context.globalAlpha = 1;
    if (this.cursor) {
      context.strokeStyle = PAINT;
      context.lineWidth = Math.max(1, this.canvas.width / 200);
      context.beginPath();
      context.arc(...this.cursor, this.radius(), 0, 2 * Math.PI);
      context.stroke();
    }
  }

  // Return the mask as base64 of a PNG, white where it is painted, or null without paint.
  result() {
    if (!this.image || !this.painted) return null;
    const canvas = document.createElement("canvas");
    canvas.width = this.layer.width;
    canvas.height = this.layer.height;
    const context = canvas.getContext("2d");
    context.drawImage(this.layer, 0, 0);
    context.globalCompositeOperation = "source-in";
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.globalCompositeOperation = "destination-over";
    context.fillStyle = "#000";
    context.fillRect(0, 0, canvas.width, canvas.height);
    return canvas.toDataURL("image/png").split(",")[1];
  }
}
