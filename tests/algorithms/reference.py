"""Every loss and advantage once more, written independently: Python floats, one number at a time, trained tokens only.

A Row lists only trained tokens, so masks do not occur. `logp` is what a gradient flows through, `frozen` the same
numbers where the method stops the gradient.
"""

import math
from dataclasses import dataclass


@dataclass
class Row:
    group: int
    reward: float
    length: int
    truncated: bool
    baseline: float
    label: int
    margin: float
    score: float
    logp: list[float]
    frozen: list[float]
    old: list[float] | None
    rollout: list[float]
    ref: list[float]
    entropy: list[float]
    value: list[float]
    old_value: list[float]
    advantage: list[float] | None = None
    returns: list[float] | None = None


def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


def std(numbers):
    m = mean(numbers)
    return math.sqrt(sum((n - m) ** 2 for n in numbers) / (len(numbers) - 1)) if len(numbers) > 1 else 0.0


def clamp(number, low, high):
    return max(low, min(high, number))


def log_sigmoid(z):
    return -math.log1p(math.exp(-z)) if z > 0 else z - math.log1p(math.exp(z))


def kl_value(estimator, d, w=1.0):
    if estimator.endswith("_ratio"):
        return w * kl_value(estimator[:2], d)
    return {"k1": d, "k2": 0.5 * d * d, "k3": math.exp(-d) - 1 + d}[estimator]


# --- advantages

def behaviour(row):
    return row.rollout if row.old is None else row.old


def token_penalties(algo, row):
    if algo.kl_coef == 0 or algo.kl_in != "reward":
        return [0.0] * len(row.logp)
    return [algo.kl_coef * kl_value(algo.kl_estimator, o - r) for o, r in zip(behaviour(row), row.ref)]


def kept(algo, row):
    return not math.isnan(row.reward) and not (algo.mask_truncated and row.truncated)


def sequence_advantages(algo, rows):
    """One number a row, None when the row is not trained on."""
    scores = [row.reward - sum(token_penalties(algo, row)) for row in rows]
    if algo.name == "dapo" and algo.overlong_free is not None:
        scores = [s - clamp((row.length - algo.overlong_free) / algo.overlong_buffer, 0, 1)
                  for s, row in zip(scores, rows)]
    out = []
    for score, row in zip(scores, rows):
        group = [s for s, other in zip(scores, rows) if other.group == row.group and not math.isnan(s)]
        flat = len(group) < 2 or max(group) == min(group)
        if math.isnan(score) or not kept(algo, row):
            out.append(None)
        elif algo.name == "remax":
            out.append(None if math.isnan(row.baseline) else score - row.baseline)
        elif algo.name == "rloo":
            out.append(None if len(group) < 2 else 0.0 if flat else score - (sum(group) - score) / (len(group) - 1))
        elif algo.name == "dr_grpo":
            out.append(0.0 if flat else score - mean(group))
        elif algo.name in ("grpo", "dapo", "gspo", "cispo"):
            out.append(0.0 if flat else (score - mean(group)) / (std(group) + 1e-4))
        else:
            raise NotImplementedError(algo.name)
    return out


def returns_of(rewards, gamma):
    out, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + gamma * total
        out.insert(0, total)
    return out


def gae_of(rewards, values, gamma, lam):
    out, running, following = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values)):
        running = reward + gamma * following - value + gamma * lam * running
        following = value
        out.insert(0, running)
    return out


def whitened(lists):
    flat = [n for numbers in lists for n in numbers]
    if len(flat) < 2:
        return lists
    m, s = mean(flat), std(flat)
    return [[0.0 if max(flat) == min(flat) else (n - m) / (s + 1e-8) for n in numbers] for numbers in lists]


def token_advantages(algo, rows):
    """(advantages, returns): a list of numbers a row, None when the row is not trained on; returns None without."""
    live = [i for i, row in enumerate(rows) if kept(algo, row)]
    rewards, returns = {}, {}
    for i in live:
        score = rows[i].reward
        if algo.name == "reinforce_pp_baseline":
            group = [r.reward for r in rows if r.group == rows[i].group and not math.isnan(r.reward)]
            score -= mean(group) if len(group) > 1 else 0.0
        rewards[i] = [-p for p in token_penalties(algo, rows[i])]
        if rewards[i]:
            rewards[i][-1] += score
    plain = {i: returns_of(rewards[i], algo.gamma) for i in live}
    if algo.name == "reinforce":
        flat = [n for i in live for n in plain[i]]
        b = mean(flat) if flat and algo.baseline == "mean" else 0.0
        advantages = {i: [n - b for n in plain[i]] for i in live}
    else:
        if algo.name == "ppo" and algo.vf_coef > 0:
            plain = {i: gae_of(rewards[i], rows[i].old_value, algo.gamma, algo.lam) for i in live}
            returns = {i: [a + v for a, v in zip(plain[i], rows[i].old_value)] for i in live}
        elif algo.name == "ppo":
            returns = plain
        advantages = dict(zip(live, whitened([plain[i] for i in live])))
    return [advantages.get(i) for i in range(len(rows))], [returns.get(i) for i in range(len(rows))]


def credit(algo, rows):
    """(advantages, returns) per row and trained token."""
    if algo.name in ("reinforce", "reinforce_pp", "reinforce_pp_baseline", "ppo"):
        return token_advantages(algo, rows)
    numbers = sequence_advantages(algo, rows)
    return [None if a is None else [a] * len(row.logp) for a, row in zip(numbers, rows)], [None] * len(rows)


# --- losses

def correction(algo, row, t):
    old = row.frozen if row.old is None else row.old
    level, _, action = algo.correction.partition("_")
    if level == "none":
        return 1.0
    if level == "sequence":
        w = math.exp(sum(o - r for o, r in zip(old, row.rollout)))
    else:
        w = math.exp(old[t] - row.rollout[t])
    low, high = algo.correction_floor, algo.correction_cap
    return clamp(w, low, high) if action == "truncate" else w if low <= w <= high else 0.0


def clip(algo, r):
    return clamp(r, 1 - algo.clip_low, 1 + (algo.clip_low if algo.clip_high is None else algo.clip_high))


def clipped(algo, r, a):
    loss = max(-r * a, -clip(algo, r) * a)
    return min(loss, -algo.dual_clip * a) if algo.dual_clip is not None and a < 0 else loss


def policy_token(algo, row, t):
    old = row.frozen if row.old is None else row.old
    a, d = row.advantage[t], row.logp[t] - old[t]
    if algo.name in ("reinforce", "remax"):
        loss = -math.exp(row.frozen[t] - old[t]) * a * row.logp[t]
    elif algo.name == "cispo":
        w = clip(algo, math.exp(row.frozen[t] - old[t]))
        loss = -w * a * row.logp[t]
    elif algo.name == "gspo":
        loss = clipped(algo, math.exp(mean(p - o for p, o in zip(row.logp, old))), a)
    else:
        loss = clipped(algo, math.exp(d), a)
    loss *= correction(algo, row, t)
    if algo.kl_coef > 0 and algo.kl_in == "loss":
        loss += algo.kl_coef * kl_value(algo.kl_estimator, row.logp[t] - row.ref[t], math.exp(d))
    loss -= algo.entropy_coef * row.entropy[t]
    if algo.name == "ppo" and algo.vf_coef > 0:
        loss += algo.vf_coef * value_token(algo, row, t)
    return loss


def value_token(algo, row, t):
    v, target = row.value[t], row.returns[t]
    loss = (v - target) ** 2
    if algo.clip_value is not None:
        loss = max(loss, (clamp(v, row.old_value[t] - algo.clip_value, row.old_value[t] + algo.clip_value) - target) ** 2)
    return loss / 2


def log_odds(p):
    return p - math.log(1 - math.exp(p))


def pair_value(algo, w, l):
    """One number for the pair of rows (chosen, rejected)."""
    if algo.name == "reward_model":
        return -log_sigmoid(w.score - l.score - w.margin) + algo.center_coef * (w.score + l.score) ** 2
    if algo.name == "simpo":
        return -log_sigmoid(algo.beta * (mean(w.logp) - mean(l.logp)) - algo.gamma)
    if algo.name == "orpo":
        return -mean(w.logp) - algo.beta * log_sigmoid(log_odds(mean(w.logp)) - log_odds(mean(l.logp)))
    assert algo.name == "dpo"
    how = mean if algo.variant == "ipo" else sum
    gap = how(p - r for p, r in zip(w.logp, w.ref)) - how(p - r for p, r in zip(l.logp, l.ref))
    up, down, e = -log_sigmoid(algo.beta * gap), -log_sigmoid(-algo.beta * gap), algo.label_smoothing
    return {"sigmoid": up, "hinge": max(0.0, 1 - algo.beta * gap), "ipo": (gap - 0.5 / algo.beta) ** 2,
            "ipo_sum": (gap - 0.5 / algo.beta) ** 2, "cdpo": (1 - e) * up + e * down,
            "robust": ((1 - e) * up - e * down) / (1 - 2 * e)}[algo.variant]


def kto_value(algo, row, z0):
    r = sum(p - q for p, q in zip(row.logp, row.ref))
    if row.label > 0:
        return algo.desirable_weight * (1 - 1 / (1 + math.exp(-algo.beta * (r - z0))))
    return algo.undesirable_weight * (1 - 1 / (1 + math.exp(-algo.beta * (z0 - r))))


def loss(algo, rows, constant):
    """The reduced loss of an optimizer batch; online rows carry their advantages (None: not trained on)."""
    live = [row for row in rows if row.logp and (not algo.online or row.advantage is not None)]
    if algo.name == "kto":
        z0 = max(0.0, mean(sum(p - q for p, q in zip(row.frozen, row.ref)) for row in live))
        return mean(kto_value(algo, row, z0) for row in live)
    if algo.reduction == "pair_mean":
        pairs = [(w, l) for w in live for l in live if w.group == l.group and w.label > 0 > l.label]
        return mean(pair_value(algo, w, l) for w, l in pairs) if pairs else 0.0
    if not live:
        return 0.0
    each = [[-p for p in row.logp] if algo.name == "sft" else [policy_token(algo, row, t) for t in range(len(row.logp))]
            for row in live]
    if algo.reduction == "token_mean":
        return mean(n for numbers in each for n in numbers)
    if algo.reduction == "sequence_mean":
        return mean(mean(numbers) for numbers in each)
    if algo.reduction == "constant":
        return sum(map(sum, each)) / (len(live) * constant)
    groups = {row.group for row in live}
    return mean(mean(n for row, numbers in zip(live, each) if row.group == g for n in numbers) for g in groups)
