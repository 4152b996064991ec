"use strict";
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const nav = document.querySelector("nav"), search = nav.querySelector("input"), tip = document.getElementById("tip");
const menu = document.getElementById("menu"), sections = all("section");
const entries = all("nav ol > li");
const at_first = menu.textContent;
let here = -1;

// Where the reader is: the last lesson whose title has gone past the upper quarter of the window.
function follow() {
  const last = sections.findLastIndex(s => s.getBoundingClientRect().top < innerHeight / 4);
  if (last === here) return;
  here = last;
  entries.forEach((li, i) => li.classList.toggle("here", i === here));
  entries[here]?.scrollIntoView({block: "nearest"});
  menu.textContent = here < 0 ? at_first : `${sections[here].querySelector("h2").textContent}`;
}
addEventListener("scroll", () => requestAnimationFrame(follow), {passive: true});

// The code of a lesson has columns: CPU, GPU, test. In a wide window they are tabs beside the text, one of which is
// open; without the text they stand beside each other. In a narrow window they lie below the text and fold.
const KINDS = {2: "cpu", 3: "gpu", 4: "test"}, wide = matchMedia("(min-width: 1200px)");
const columns = all(".cols").map(c => all(".col", c));
let text_shown = true;
const are_tabs = () => wide.matches && text_shown;

function show(col) {
  if (are_tabs()) all(".col", col.parentNode).forEach(c => c.classList.add("folded"));
  col.classList.remove("folded");
}
function arrange() {  // what is open at first, and again when columns become tabs or tabs columns
  columns.flat().forEach(c => c.classList.toggle("folded", !wide.matches || text_shown));
  columns.forEach(cols => show(cols.find(c => c.classList.contains(c.parentNode.dataset.open))));
  sections.forEach(s => s.classList.toggle("no-idea", !text_shown && s.querySelector(".cols") !== null));
  all(".whole").forEach(b => b.textContent = text_shown ? "code alone" : "code beside the text");
}
function fold_all(kind) {
  const of_kind = all(".col." + kind), fold = of_kind.some(c => !c.classList.contains("folded"));
  if (are_tabs()) of_kind.forEach(show);
  else of_kind.forEach(c => c.classList.toggle("folded", fold));
}
function toggle_text() { text_shown = !text_shown, arrange(); }
all(".col .head").forEach(b => b.onclick = () => are_tabs() ? show(b.parentNode) : b.parentNode.classList.toggle("folded"));
all(".whole").forEach(b => b.onclick = () => keep_place(toggle_text, b.closest("section")));
all("section > header").forEach(h => h.onclick = () => h.parentNode.classList.toggle("folded"));
wide.addEventListener("change", () => keep_place(arrange));
arrange();

// Changes the page; the lesson at hand stays where it is on the screen, or its title is shown.
function keep_place(change, at = sections[Math.max(here, 0)]) {
  const before = Math.max(at.getBoundingClientRect().top, 0);
  change();
  scrollBy(0, at.getBoundingClientRect().top - before);
}
addEventListener("keydown", e => {
  if (e.key === "Escape") search.value = "", find(), search.blur(), nav.classList.remove("open");
  if (e.target === search || e.ctrlKey || e.metaKey || e.altKey) return;
  const at = sections[Math.max(here, 0)];
  if (e.key === "j") sections[Math.min(here + 1, sections.length - 1)].scrollIntoView();
  else if (e.key === "k") (sections[here - 1] ?? document.body).scrollIntoView();
  else if (e.key === "f") at.classList.toggle("folded"), at.scrollIntoView();
  else if (e.key === "1") keep_place(toggle_text);
  else if (KINDS[e.key]) keep_place(() => fold_all(KINDS[e.key]));
  else if (e.key === "/") nav.classList.add("open"), search.focus();
  else return;
  e.preventDefault();
});

function find() {
  const word = search.value.trim().toLowerCase();
  nav.classList.toggle("searching", word !== "");
  for (const li of entries) {
    const hits = all("ul li", li).filter(f => f.classList.toggle("hit", word !== "" && f.textContent.toLowerCase().includes(word)));
    li.classList.toggle("found", hits.length > 0);
  }
}
search.oninput = find;
search.onkeydown = e => { if (e.key === "Enter") search.blur(), nav.querySelector(".hit a")?.click(); };

// A link opens what it leads to. Beside the text only the code moves, if the lesson is in view.
function go() {
  const to = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
  if (!to || to.id === "top") return;
  const col = to.closest(".col"), section = to.closest("section");
  section?.classList.remove("folded");
  if (col) show(col);
  if (!col || !are_tabs()) return to.scrollIntoView();
  const cols = col.parentNode, body = to.parentNode;
  if (Math.abs(cols.getBoundingClientRect().top) > innerHeight / 3) section.scrollIntoView();
  body.scrollTop += to.getBoundingClientRect().top - body.getBoundingClientRect().top;
}
addEventListener("hashchange", go);
addEventListener("click", e => {  // the browser's own jump would move the text, too
  const link = e.target.closest?.("a[href^='#']"), at = scrollY;
  if (!link) return;
  e.preventDefault();
  nav.classList.remove("open");
  const known = location.hash === link.hash;
  location.hash = link.hash;
  scrollTo(0, at);
  if (known) go();
});
menu.onclick = () => nav.classList.toggle("open");

addEventListener("mouseover", e => {
  const link = e.target.closest?.("main a[href^='#']"), to = link && document.getElementById(link.hash.slice(1));
  tip.hidden = !to?.dataset.say;
  if (tip.hidden) return;
  tip.innerHTML = "<b></b><span></span>";
  tip.firstChild.textContent = to.querySelector("small").textContent, tip.lastChild.textContent = to.dataset.say;
  const at = link.getBoundingClientRect(), below = at.bottom + tip.offsetHeight + 12 < innerHeight;
  tip.style.left = Math.max(8, Math.min(at.left, innerWidth - tip.offsetWidth - 12)) + "px";
  tip.style.top = (below ? at.bottom + 7 : at.top - tip.offsetHeight - 7) + "px";
});
go(), follow();
