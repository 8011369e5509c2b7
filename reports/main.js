// Everything starts here; the parts before it only say what they can do.
readPalette();
measure();
drawings.push(drawTimeline, ...(memoryCanvas ? [drawMemory] : []));
startTimeline();
if (memoryCanvas) startMemory();
startStages();
new ResizeObserver(() => { measure(); redraw(); }).observe(canvas);
const themes = [matchMedia("(prefers-color-scheme: dark)"), matchMedia("print")];
for (const theme of themes) theme.addEventListener("change", () => { readPalette(); draw(); });
addEventListener("beforeprint", () => { for (const item of document.querySelectorAll("details")) item.open = true; });
draw();
timing.first = performance.now() - began;
setTimeout(() => { readers = arrows(); redraw(); });
