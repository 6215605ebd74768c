// Buttons that copy code. Without scripts they stay hidden, and readers select the code by hand.

for (const button of document.querySelectorAll("[data-copy]")) {
  const code = button.parentElement.querySelector("code");
  button.hidden = false;
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(code);
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {  // Some browsers forbid this on pages from a disk; the code is selected.
      button.textContent = "Press Ctrl+C";
    }
  });
}
