// Runs before anything is drawn, so that a page that is to be dark never flashes white.
try {
  document.documentElement.dataset.theme = JSON.parse(localStorage.getItem("modulm.theme")) ?? "auto";
} catch {
  document.documentElement.dataset.theme = "auto";
}
