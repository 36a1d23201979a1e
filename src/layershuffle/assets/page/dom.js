// Elements, with text always set as text: names of hosts and classes come from outside.

export const at = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// Only if it differs: a live region reads out what is set, and a selection in it would be lost.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// The colour of a block goes by its place in the model, so that disorder is seen at a glance.
export function hue(element, block, depth) {
  element.style.setProperty("--hue", 255 + (145 * block) / Math.max(1, depth - 1));
}

let key = sessionStorage.getItem("key") ?? "";
// The operator's key comes behind the # of the address, which no server sees and no log keeps.
const operator = window.location.hash.slice(1) || (sessionStorage.getItem("operator") ?? "");
sessionStorage.setItem("operator", operator);
window.history.replaceState(null, "", window.location.pathname);
export const mayKill = () => operator !== "";

// fetch with the operator's key or that of the API, which is asked for once where the server wants one:
// who gave none or a wrong one loads the page again.
let asked = false;
export async function ask(path, options = {}) {
  const operating = path.startsWith("operator/");
  const keys = (own) => own && { Authorization: `Bearer ${own}` };
  const send = async () => {
    const headers = { ...options.headers, ...keys(operating ? operator : key) };
    try {
      return await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The server does not answer. If it has ended, start it again", { cause: error });
    }
  };
  let response = await send();
  if (response.status === 401 && !operating && !asked) {
    asked = true;
    const given = window.prompt("This server wants an API key");
    if (given) {
      key = given.trim();
      sessionStorage.setItem("key", key);
      response = await send();
    }
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const { cause = `The server answered ${response.status}`, hint = "" } = body.error ?? {};
  throw Object.assign(new Error(hint ? `${cause}: ${hint}` : cause), { status: response.status });
}
