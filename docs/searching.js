// The site's search: which page comes first, and which of its sections is shown. Sphinx loads it before its own script.

const ANSWERS = /^(faq|troubleshooting|errors|first-training)$/;
const FOR_DEVELOPERS = /^(architecture|inside-.*|benchmarks|changelog|contributing|maintainers|measuring|promises|reporting)$/;

// Sphinx gives 15 to a page with a word in a heading and 5 to one with it in its text, and puts equal ones in the order
// of the alphabet: the changelog would come before the answer. The other numbers are Sphinx's.
var Scorer = {
  score: ([page, , , , score]) => score + (ANSWERS.test(page) ? 4 : FOR_DEVELOPERS.test(page) ? -12 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

// Sphinx shows the first of the words on a page, mostly that of its breadcrumbs, and leads to the page's top. Here the
// section that has the most of the words is shown, and has a link.
document.addEventListener("DOMContentLoaded", () => {
  const typed = new URLSearchParams(location.search).get("q") ?? "";
  const words = typed.toLowerCase().split(/[^\p{L}\d_.%-]+/u).filter((word) => word.length > 2)
    .map((word) => word.replace(/(?<=\w{3})((\w)(?<=\2\2)ing|ing|es|s|ed|e|y)$/, ""));
  Search.makeSearchSummary = (page) => {
    const found = bestSection(new DOMParser().parseFromString(page, "text/html"), words);
    if (!found) return null;
    const summary = document.createElement("p");
    summary.className = "context";
    if (found.id) {
      const link = summary.appendChild(document.createElement("a"));
      link.textContent = found.heading;
      // Sphinx adds the summary to the item of the page only now.
      queueMicrotask(() => {
        link.href = summary.parentNode.querySelector("a").href.split("#")[0] + "#" + found.id;
      });
      summary.append(": ");
    }
    summary.append(excerpt(found.text, words.some((word) => has(found.heading, word)) ? [] : words));
    return summary;
  };
});

function bestSection(page, words) {
  page.querySelectorAll(".headerlink, script, style, .prev-next-area").forEach((node) => node.remove());
  let best = null;
  for (const section of page.querySelectorAll("article section")) {
    const own = [...section.children].filter((node) => node.tagName !== "SECTION");
    const [title, text] = [true, false].map((wanted) =>
      own.filter((node) => /^H\d$/.test(node.tagName) === wanted).map((node) => node.textContent).join(" ").replace(/\s+/g, " ").trim()
    );
    const found = { heading: title, text, id: section.parentNode.closest("section") && section.id };
    found.score = words.reduce((sum, word) => sum + 4 * has(`${title} ${text}`, word) + has(title, word), text ? 0.5 : 0);
    if (!best || found.score > best.score) best = found;
  }
  return best;
}

function has(text, word) {
  return place(text, word) >= 0 ? 1 : 0;
}

// Where a word begins that begins with this one.
function place(text, word) {
  return text.search(new RegExp(`(?<![\\p{L}\\d])${word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}`, "iu"));
}

function excerpt(text, words) {
  const places = words.map((word) => place(text, word)).filter((found) => found >= 0);
  const wanted = Math.max(Math.min(...places, text.length) - 60, 0);
  const start = places.length && wanted ? text.indexOf(" ", wanted) + 1 : 0;
  return (start ? "… " : "") + text.slice(start, start + 200) + (start + 200 < text.length ? " …" : "");
}
