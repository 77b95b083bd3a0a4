// The gateway's endpoints that the page uses.

// Throws Refusal for a key that no header can hold: such a one is never right.
function headers(key) {
  if (/[^\x21-\x7e]/.test(key)) throw new Refusal("Incorrect API key.", "", {status: 401, kind: "invalid_api_key"});
  return {"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})};
}

// An error of a request. `field`: its dotted path in the request, or "". `status`: of HTTP, 0 without an answer.
// `kind`: the gateway's name of the cause. `seconds`: to wait before the next try, or 0.
export class Refusal extends Error {
  constructor(message, field = "", {status = 0, kind = "", seconds = 0} = {}) {
    super(message);
    Object.assign(this, {field, status, kind, seconds});
  }
}

async function refusalOf(answer) {
  let body = {};
  try {
    body = await answer.json();
  } catch {
    // not JSON: the status has to do
  }
  const isOpenAi = typeof body.error === "object" && body.error !== null;
  const {message, code} = isOpenAi ? body.error : {message: body.error, code: body.kind};
  const seconds = Number(answer.headers.get("Retry-After")) || 0;
  const cause = {status: answer.status, kind: String(code ?? ""), seconds};
  return new Refusal(String(message ?? `The answer has status ${answer.status}.`), String(body.field ?? ""), cause);
}

// Wait for the network. Throws Refusal if it fails, which it does with another message in each browser.
async function arrival(promise) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Refusal("The connection failed.", "", {kind: "unreachable"});
  }
}

export async function describe(key) {
  const answer = await arrival(fetch("v1/description", {headers: headers(key)}));
  if (!answer.ok) throw await refusalOf(answer);
  return answer.json();
}

// Return whether the gateway can use a server: true, false, or null if the gateway itself does not answer.
export async function health() {
  try {
    return (await fetch("health", {signal: AbortSignal.timeout(10_000)})).ok;
  } catch {
    return null;
  }
}

// Yield the events of a request. Ends when the images are finished; aborting `signal` closes the connection.
export async function* generate(settings, model, key, signal) {
  const address = `v1/models/model:predict?model=${encodeURIComponent(model)}`;
  const body = JSON.stringify({...settings, stream: true});
  const answer = await arrival(fetch(address, {method: "POST", headers: headers(key), body, signal}));
  if (!answer.ok) throw await refusalOf(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await arrival(reader.read());
    if (done) throw new Refusal("The connection ended.", "", {kind: "unreachable"});
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const event = JSON.parse(line);
      if (event.event === "error") throw new Refusal(String(event.error), String(event.field ?? ""), event);
      yield event;
      if (event.event === "done") return;
    }
  }
}
