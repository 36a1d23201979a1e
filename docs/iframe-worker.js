// Browsers start no worker for a page that was opened from a disk. The search then runs its script in
// a hidden frame, which gets and gives messages as a worker does.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.document.open(); // Firefox makes the frame's first document anew, and loses scripts
      inside.document.write("<body></body>");
      inside.document.close();
      inside.postMessage = (data) => {
        this.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
      };
      inside.importScripts = (...files) => Promise.all(files.map((file) => this.#run(file)));
      this.ready = this.#run(address);
    }

    #run(file) {
      const script = this.frame.contentDocument.createElement("script");
      const loaded = new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = reject;
      });
      script.async = false;
      script.src = file;
      this.frame.contentDocument.body.append(script);
      return loaded;
    }

    postMessage(data) {
      const inside = this.frame.contentWindow;
      const deliver = () => inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      this.ready.then(deliver);
    }
  };
}
