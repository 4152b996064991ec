"use strict";
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const nav = document.querySelector("nav"), search = nav.querySelector("input"), tip = document.getElementById("tip");
const menu = document.getElementById("menu"), sections = all("section");
const entries = all("nav ol > li");
let here = -1;

// Where the reader is: the last lesson whose title has gone past the upper quarter of the window.
function follow() {
  const last = sections.findLastIndex(s => s.getBoundingClientRect().top < innerHeight / 4);
  if (last === here) return;
  here = last;
  entries.forEach((li, i) => li.classList.toggle("here", i === here));
  entries[here]?.scrollIntoView({block: "nearest"});
  menu.textContent = here < 0 ? "Lessons" : `${sections[here].querySelector("h2").textContent}`;
}
addEventListener("scroll", () => requestAnimationFrame(follow), {passive: true});

// Folds: one column of a lesson, or (keys 1 to 4) of all; f folds a lesson to its idea.
const KINDS = {2: "cpu", 3: "gpu", 4: "test"};
function fold_all(kind) {
  const cols = all(".col." + kind), fold = cols.some(c => !c.classList.contains("folded"));
  cols.forEach(c => c.classList.toggle("folded", fold));
}
all(".col .head").forEach(b => b.onclick = () => b.parentNode.classList.toggle("folded"));
all("section > header").forEach(h => h.onclick = () => h.parentNode.classList.toggle("folded"));
all(innerWidth > 1000 ? ".col.test" : ".col.test, .col.gpu").forEach(c => c.classList.add("folded"));

// A column that is shorter than its neighbour stays in view beside it.
const watch = new ResizeObserver(changed => changed.forEach(({target: body}) => {
  const head = body.previousElementSibling.offsetHeight;
  body.style.top = innerWidth > 1000 ? Math.min(head, innerHeight - body.offsetHeight - 24) + "px" : "auto";
}));
all(".col .body").forEach(body => watch.observe(body));

function keep_place(change) {  // the lesson at hand stays where it is on the screen
  const at = sections[Math.max(here, 0)], before = at.getBoundingClientRect().top;
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
  else if (e.key === "1") keep_place(() => {
    const fold = sections.some(s => !s.classList.contains("no-idea"));
    sections.forEach(s => s.classList.toggle("no-idea", fold));
  });
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

// A link opens what it leads to.
function go() {
  const to = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
  if (!to || to.id === "top") return;
  to.closest(".col")?.classList.remove("folded");
  to.closest("section")?.classList.remove("folded");
  document.body.classList.add("still");
  to.scrollIntoView();
  document.body.classList.remove("still");
}
addEventListener("hashchange", go);
nav.addEventListener("click", e => { if (e.target.closest("a")) nav.classList.remove("open"), setTimeout(go); });
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
