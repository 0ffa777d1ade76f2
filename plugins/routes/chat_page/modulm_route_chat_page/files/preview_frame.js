// Inside the frame of a preview: an origin of its own, without network. It shows what it is sent once.

addEventListener("message", ({ data, source }) => {
  if (source !== parent || typeof data !== "string") return;
  document.open();
  document.write(data);
  document.close();
}, { once: true });
parent.postMessage("ready", "*");
