// The order of what the site's search finds. Sphinx gives 15 to a page with a word in a heading and 5 to one with it in
// its text, and puts equal ones in the order of the alphabet: the changelog would come before the answer.
const ANSWERS = /^(faq|troubleshooting|errors|first-training)$/;
const FOR_DEVELOPERS = /^(architecture|inside-.*|benchmarks|changelog|contributing|maintainers|measuring|promises|reporting)$/;

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
