// Whether the lowest or the highest of a metric is the best, as far as the words of its name say.

const ERRORS = phrases(
  "loss, losses, err, errs, error, errors, wer, cer, ter, eer, ece, fpr, fnr, brier, false, ppl, perplexity",
  "mae, mse, mape, smape, msle, rmse, rmsle, nmse, nrmse, mase, nll, negative log likelihood, log loss",
  "kl, kld, kl div, divergence, bce, ce, xent, crossentropy, cross entropy, bits, bpb, bpc, bpd",
  "fid, kid, lpips, regret",
);
const COSTS = phrases(
  "time, times, runtime, walltime, duration, elapsed, latency, ttft, overhead, ms, sec, secs, seconds",
  "minutes, hours, memory, mem, rss, vram, bytes, kb, mb, gb, kib, mib, gib",
);
const SCORES = phrases(
  "accuracy, acc, f1, f2, fbeta, f score, precision, recall, sensitivity, specificity, tpr, tnr, hits",
  "auc, auroc, auprc, ap, map, miou, iou, dice, jaccard, ndcg, mrr, mcc, matthews, kappa, r2, psnr, ssim",
  "pearson, pearsonr, spearman, spearmanr, correlation, bleu, sacrebleu, rouge, rougel, rougelsum, meteor",
  "chrf, cider, bertscore, exact, exact match, em, reward, rewards, win rate, success rate, elo",
  "throughput, speedup, bandwidth, fps, qps, tps, mfu",
);
const NEITHER = phrases(
  "std, stdev, stddev, variance, threshold, thresh, weight, coef, coefficient, scale, free, available, left",
);
const RATE = / per (s|sec|second|min|minute|hour|day) /;

function phrases(...lines) {
  return lines.flatMap((line) => line.split(", "));
}

/** Write the words of a name between blanks: as they are, where capitals begin one, and both without digits. */
function spelled(name) {
  const capitals = name.replace(/([a-z\d])([A-Z])/g, "$1 $2").replace(/([A-Z])([A-Z][a-z])/g, "$1 $2");
  const ways = [name, capitals].flatMap((way) => [way, way.replace(/\d+/g, " ")]);
  return ways.map((way) => ` ${way.toLowerCase().replace(/[^\p{L}\d]+/gu, " ").trim()} `);
}

/** Tell whether the lowest or the highest of a metric is the best: -1, 1, or 0 where its name does not say. */
export function better(name) {
  const ways = spelled(name);
  const has = (list) => list.some((phrase) => ways.some((way) => way.includes(` ${phrase} `)));
  if (has(NEITHER)) return 0;
  if (ways.some((way) => RATE.test(way))) return has(ERRORS) ? 0 : 1;
  if (ways.some((way) => way.endsWith(" loss "))) return -1; // also of a score, such as `dice_loss`
  const low = has(ERRORS) || has(COSTS);
  if (low && has(SCORES)) return 0; // such as `time_to_accuracy`
  if (low) return -1;
  return has(SCORES) || has(["score", "scores"]) ? 1 : 0; // a `brier_score` is an error
}
