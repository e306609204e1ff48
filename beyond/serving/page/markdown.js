// Answers are Markdown: code, bold, headings and lists. Text becomes text nodes and never HTML, so no answer can bring a
// script, a picture or a link.

function make(tag, text, className = "") {
  const element = document.createElement(tag);
  element.className = className;
  if (text) inline(element, text);
  return element;
}

function inline(parent, text) {
  text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).forEach((part, i) => {
    if (i % 2 === 0) return parent.append(part);
    const element = document.createElement(part[0] === "`" ? "code" : "b");
    element.textContent = part[0] === "`" ? part.slice(1, -1) : part.slice(2, -2);
    parent.append(element);
  });
}

function lines(whole, text) {
  text.split(/(?<=\n)/).forEach((line) => {
    const [, indent, mark, item] = line.match(/^(\s*)([-*+]|\d+[.)])\s+(\S.*)/) ?? [];
    const [, heading] = line.match(/^#{1,6}\s+(\S.*)/) ?? [];
    if (heading) whole.append(make("div", heading, "heading"));
    else if (mark) {
      const element = make("div", "", "item");
      element.style.setProperty("--indent", indent.length);
      element.dataset.mark = /\d/.test(mark) ? mark : "•";
      inline(element, item);
      whole.append(element);
    } else inline(whole, line);
  });
}

// A fence that is still open belongs to an answer under way: what comes behind it is code already.
export function render(text) {
  const whole = document.createDocumentFragment();
  text.split(/^```.*(?:\n|$)/m).forEach((part, i) => {
    if (i % 2 === 0) return lines(whole, part);
    const code = document.createElement("pre");
    code.textContent = part;
    whole.append(code);
  });
  return whole;
}
