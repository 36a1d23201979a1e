// The page of a tab that is a host: it starts the worker and shows what that says.

import { canSpeak } from "./wire.js";

const at = (id) => document.getElementById(id);
const say = (element, text) => { if (element.textContent !== text) element.textContent = text; };

// The token comes behind the # of the address, which no server sees and no log keeps.
const token = decodeURIComponent(window.location.hash.slice(1)) || (sessionStorage.getItem("host-token") ?? "");
sessionStorage.setItem("host-token", token);
window.history.replaceState(null, "", window.location.pathname);

function missing() {
  if (token === "") return "The address lacks the token: take the one that the gateway prints, or its QR code.";
  if (!window.isSecureContext) return "Browsers let only an https address do this: start the gateway with --https-certificate.";
  if (!canSpeak()) return "This browser is too old: it has no Float16Array.";
  return "";
}

function cannot(reason, state = "is no host") {
  say(at("state"), state);
  at("state").dataset.good = false;
  say(at("why"), reason);
}

function show({ why, name, held, wanted, served, ms }) {
  if (why) {
    cannot(`Now: ${why}.`, "is no host now");
  } else {
    say(at("state"), held.length < wanted ? "is loading its blocks" : "is a host");
    at("state").dataset.good = true;
    say(at("why"), "");
  }
  say(at("name"), name);
  say(at("held"), String(held.length));
  say(at("served"), String(served));
  say(at("ms"), ms === null ? "\u2013" : ms.toFixed(1));
  if (at("blocks").dataset.held === String(held)) return;
  at("blocks").dataset.held = String(held);
  at("blocks").replaceChildren(...held.map((block) => {
    const chip = document.createElement("span");
    chip.className = "chip";
    chip.style.setProperty("--hue", 255 + (25 * block) % 145);
    chip.textContent = block;
    return chip;
  }));
}

function start() {
  const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  worker.onmessage = ({ data }) => show(data);
  worker.onerror = (event) => cannot(`The worker has ended: ${event.message || "it cannot be loaded"}`);
  worker.postMessage({ token });
  // What the gateway learns so, it need not find out. Nothing is lost if there is no time for it.
  window.addEventListener("pagehide", () => worker.postMessage("drain"));
  document.addEventListener("freeze", () => worker.postMessage("drain"));
  window.addEventListener("pageshow", ({ persisted }) => { if (persisted) window.location.reload(); });
  document.addEventListener("resume", () => window.location.reload());
}

// A phone that sleeps is no host. It may refuse, to save its battery.
const stayAwake = () => navigator.wakeLock?.request("screen").catch(() => {});

const lacking = missing();
if (lacking) {
  cannot(lacking);
} else {
  start();
  stayAwake();
  document.addEventListener("visibilitychange", () => { if (!document.hidden) stayAwake(); });
}
