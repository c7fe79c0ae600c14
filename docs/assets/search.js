// What is pasted into the search is the text of an error. Signs that search reads as commands ("-9" as "without 9") are
// no commands there. Numbers of one's own job (of ranks, processes, calls, lines) lead to no page, and some make search fail.
function plainWords(text) {
  return text
    .replace(/[^\p{L}\p{N}_']+/gu, " ")
    .replace(/(^| )\d+(?= |$)/g, "")
    .trim();
}

document.addEventListener("paste", (event) => {
  const field = event.target;
  if (!(field instanceof HTMLInputElement) || field.dataset.mdComponent !== "search-query") return;
  event.preventDefault();
  const pasted = plainWords(event.clipboardData.getData("text"));
  field.setRangeText(pasted, field.selectionStart, field.selectionEnd, "end");
  field.dispatchEvent(new Event("input", { bubbles: true }));
  field.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
});
