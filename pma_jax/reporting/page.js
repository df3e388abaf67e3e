// Draw the plots of the page, again whenever the reader's colour scheme changes.
(() => {
  const plots = document.getElementById("plots").textContent;
  const dark = JSON.parse(document.getElementById("dark-colors").textContent);
  const prefersDark = matchMedia("screen and (prefers-color-scheme: dark)");
  const recolor = (_, value) => (prefersDark.matches && Object.hasOwn(dark, value) ? dark[value] : value);
  const draw = () => {
    for (const [id, plot] of Object.entries(JSON.parse(plots, recolor))) {
      const place = document.getElementById(id);
      place.replaceChildren();
      Bokeh.embed.embed_item(plot, place);
    }
  };
  prefersDark.addEventListener("change", draw);
  draw();
})();
