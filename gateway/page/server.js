// The connection: the releases that are served, and whether a server can be used now.

import {Refusal, describe, health} from "./api.js";

const UP_MILLISECONDS = 10_000; // between two questions while a server can be used; none while the page is not visible
const DOWN_MILLISECONDS = 2_000;
const MAX_ATTEMPTS = 200; // to read the releases; each may start a replica of a deployed model
const NO_GATEWAY = "The gateway does not answer";
const NO_SERVER = "The server does not answer";

export class Server {
  models = [];
  keyRequired = false;
  problem = "Connecting"; // what prevents a request, or ""
  isUp = true;
  #attempts = 0;
  #polls = 0;
  #timer = null;

  // `key`: returns the API key. `onModels` is called with the releases when they change, `onState` after each answer.
  constructor(key, onModels, onState) {
    Object.assign(this, {key, onModels, onState});
    document.addEventListener("visibilitychange", () => this.poll());
  }

  #report(problem, isUp = this.isUp) {
    Object.assign(this, {problem, isUp});
    this.onState();
  }

  // Read the releases. Throws Refusal if there are none to offer.
  async connect() {
    const attempt = ++this.#attempts;
    let found;
    try {
      found = await describe(this.key());
    } catch (error) {
      this.keyRequired ||= error.status === 401;
      if (error.status === 401) this.#report("This API key is not accepted");
      else this.#report(error.status ? error.message : NO_GATEWAY, false);
      throw error;
    }
    if (attempt !== this.#attempts) return; // another attempt began meanwhile
    const isChanged = JSON.stringify(found.models) !== JSON.stringify(this.models);
    this.models = found.models;
    this.keyRequired = found.key_required;
    if (isChanged && this.models.length) this.onModels();
    if (this.keyRequired && !this.key()) {
      this.#report("Enter an API key");
      throw new Refusal("", "", {kind: "invalid_api_key"});
    }
    const nothing = attempt < MAX_ATTEMPTS ? "No server has answered yet" : "No server can be reached";
    this.#report(!this.models.length ? nothing : this.isUp ? "" : NO_SERVER);
    if (!this.models.length) throw new Refusal(`${nothing}.`);
  }

  // Ask for the health now, and again after a while. The releases are read again when a server is back.
  async poll() {
    clearTimeout(this.#timer);
    if (document.hidden) return;
    const poll = ++this.#polls;
    const isHealthy = await health();
    if (poll !== this.#polls) return; // another poll began meanwhile: this answer is older
    const isMissing = !this.models.length && !this.keyRequired && this.#attempts < MAX_ATTEMPTS;
    if (!isHealthy) {
      this.#report(isHealthy === null ? NO_GATEWAY : NO_SERVER, false);
    } else if (!this.isUp || isMissing) {
      this.isUp = true;
      await this.connect().catch(() => {}); // the state has the reason
    }
    if (poll !== this.#polls) return;
    const isSettled = this.isUp && (this.models.length || this.keyRequired);
    this.#timer = setTimeout(() => this.poll(), isSettled ? UP_MILLISECONDS : DOWN_MILLISECONDS);
  }
}
