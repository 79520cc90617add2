// Follows the runs of a page that `terakoya report --live` serves; it comes after page.js.
let seen = "", every = Number(document.body.dataset.every) * 1000;
const note = document.getElementById("live");
async function follow() {
  if (choosing) return void setTimeout(follow, 200);
  try {
    const answer = await fetch("body", {headers: seen ? {"If-None-Match": seen} : {}});
    if (answer.status === 200) {
      const open = [...document.querySelectorAll("details")].map(each => each.open);
      const off = [...document.querySelectorAll("input:not(:checked)")].map(each => each.id);
      document.querySelector("main").innerHTML = await answer.text();
      document.querySelectorAll("details").forEach((each, at) => { each.open = !!open[at]; });
      off.forEach(id => { const box = document.getElementById(id); if (box) box.checked = false; });
      seen = answer.headers.get("ETag") || "";
      followPointers();
    }
    const isWrong = answer.status >= 400;  // such as a run whose folder is gone
    note.textContent = isWrong ? await answer.text() : words.live;
    note.className = isWrong ? "bad" : "good";
  } catch {
    note.textContent = words.gone;
    note.className = "bad";
  }
  setTimeout(follow, every);
}
setTimeout(follow, every);
