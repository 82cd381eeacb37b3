// A stub, until branch page is there.
export function mount(root, options) {
  root.className = "manycpu-page";
  return {
    update({ report, tasks }) {
      root.textContent = "";
      const pre = document.createElement("pre");
      pre.textContent = JSON.stringify({ state: report.state, loss: report.series?.loss?.values, dark: options.dark });
      root.append(pre);
      for (const task of tasks) {
        const a = document.createElement("a");
        a.textContent = `${task.name} ${task.state} ${task.seconds}`;
        a.href = task.href;
        a.onclick = task.onClick;
        root.append(a, document.createElement("br"));
      }
    },
    destroy() { root.textContent = ""; },
  };
}
export function mountHistory(root, options) {
  return {
    update(rows) {
      root.textContent = "";
      for (const row of rows) {
        const a = document.createElement("a");
        a.textContent = `${row.id} ${row.state} ${row.seconds} ${JSON.stringify(row.document.metrics)}`;
        a.href = row.href;
        a.onclick = row.onClick;
        root.append(a, document.createElement("br"));
      }
    },
    destroy() { root.textContent = ""; },
  };
}
