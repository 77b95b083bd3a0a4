// The gateway's endpoints that the page uses.

function headers(key) {
  return key ? {"Content-Type": "application/json", Authorization: `Bearer ${key}`} : {"Content-Type": "application/json"};
}

// An error with the request's field, or "" if no field is the cause.
export class Refusal extends Error {
  constructor(message, field = "", status = 0) {
    super(message);
    this.field = field;
    this.status = status;
  }
}

async function refusalOf(answer) {
  let body = {};
  try {
    body = await answer.json();
  } catch {
    // not JSON: the status has to do
  }
  const error = typeof body.error === "object" && body.error !== null ? body.error : {message: body.error};
  return new Refusal(String(error.message ?? `Status ${answer.status}`), String(body.field ?? ""), answer.status);
}

export async function describe(key) {
  const answer = await fetch("v1/description", {headers: headers(key)});
  if (!answer.ok) throw await refusalOf(answer);
  return answer.json();
}

// Yield the events of a request. Ends when the images are finished; aborting `signal` closes the connection.
export async function* generate(request, model, key, signal) {
  const address = `v1/models/model:predict?model=${encodeURIComponent(model)}`;
  const body = JSON.stringify({...request, stream: true});
  const answer = await fetch(address, {method: "POST", headers: headers(key), body, signal});
  if (!answer.ok) throw await refusalOf(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) throw new Refusal("The connection ended before the images were finished.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const event = JSON.parse(line);
      if (event.event === "error") throw new Refusal(String(event.error), String(event.field ?? ""), event.status);
      yield event;
      if (event.event === "done") return;
    }
  }
}
