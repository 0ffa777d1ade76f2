// Sound from the microphone, as a file beside the message.

import { byId, icon, toast } from "./dom.js";
import { t } from "./words.js";

/** A button that records until it is pressed again. */
export class Recorder {
  /** recorded(file). */
  constructor(recorded) {
    this.recorded = recorded;
    this.button = byId("record");
    this.button.addEventListener("click", () => (this.recording ? this.recording.stop() : this.begin()));
  }

  /** Shown where the model hears and the browser gives a microphone. */
  offer(kinds) {
    this.button.hidden = !(kinds.includes("audio") && navigator.mediaDevices && window.MediaRecorder);
  }

  async begin() {
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    } catch {
      toast(t("The browser does not allow the microphone."));
      return;
    }
    const pieces = [], recording = new MediaRecorder(stream);
    recording.addEventListener("dataavailable", ({ data }) => pieces.push(data));
    recording.addEventListener("stop", () => {
      for (const track of stream.getTracks()) track.stop();
      this.show(null);
      const type = recording.mimeType.split(";")[0] || "audio/webm";
      this.recorded(new File(pieces, `recording.${type.split("/")[1]}`, { type: type.replace("video/", "audio/") }));
    });
    recording.start();
    this.show(recording);
  }

  show(recording) {
    this.recording = recording;
    const label = t(recording ? "Stop recording" : "Record sound");
    this.button.setAttribute("aria-label", label);
    this.button.setAttribute("aria-pressed", String(Boolean(recording)));
    this.button.title = label;
    this.button.replaceChildren(icon(recording ? "stop" : "record"));
  }
}
