"""Encoder-decoders: the prompt goes through the encoder, the response through the decoder, each sequence alone.

The states land in the packed layout of decoder-only models, so everything above is the same: the decoder's start token
stands where a prompt's last token would, since it is what predicts a response's first token.
"""

from __future__ import annotations

import numpy as np
import torch

from verl.core.errors import ModelError
from verl.models.head import HeadSpec
from verl.models.lm import LM
from verl.models.packed import Packed


def hidden(lm: LM, packed: Packed) -> torch.Tensor:
    """Decoder states [N, D] of a packed batch; a prompt's rows are 0 but for its last one, the start token's."""
    module, places, pieces, starts = lm.module, [], [], set()
    start = torch.tensor([module.config.decoder_start_token_id], device=lm.device)
    encoded: dict[int, torch.Tensor] = {}
    for s in np.flatnonzero(packed.parent >= 0):
        parent, own = int(packed.parent[s]), int(packed.lengths[s])
        first, last = int(packed.starts[parent]), int(packed.starts[parent + 1])
        if parent not in encoded:
            encoded[parent] = module.get_encoder()(input_ids=packed.ids_N[None, first:last]).last_hidden_state
        tokens = packed.ids_N[packed.starts[s]:packed.starts[s] + own]
        states = module.get_decoder()(input_ids=torch.cat([start, tokens])[None], encoder_hidden_states=encoded[parent],
                                      use_cache=False).last_hidden_state[0]
        skip = int(parent in starts)  # the start token's state depends on the prompt alone
        starts.add(parent)
        places += [last - 1] * (1 - skip) + list(range(int(packed.starts[s]), int(packed.starts[s]) + own))
        pieces.append(states[skip:])
    out = pieces[0].new_zeros(len(packed), pieces[0].shape[1])
    return out.index_copy(0, torch.tensor(places, device=lm.device), torch.cat(pieces))


@torch.no_grad()
def prove(lm: LM) -> None:
    """Find how the output layer scales the decoder's states (T5 divides by sqrt(d) when tied), or raise ModelError."""
    module, rows = lm.module, lm.head.rows
    rng = np.random.default_rng(0)
    prompt, answer = (torch.from_numpy(rng.integers(0, rows, n)).to(lm.device) for n in (7, 5))
    start = torch.tensor([module.config.decoder_start_token_id], device=lm.device)
    ids = torch.cat([start, answer])[None]
    want = module(input_ids=prompt[None], decoder_input_ids=ids, use_cache=False).logits[0].float()
    encoded = module.get_encoder()(input_ids=prompt[None]).last_hidden_state
    states = module.get_decoder()(input_ids=ids, encoder_hidden_states=encoded, use_cache=False).last_hidden_state[0]
    for scale in (1.0, states.shape[-1] ** -0.5):
        lm.head = HeadSpec(rows, scale)
        error = float((lm.logits(states)[:, :rows] - want[:, :rows]).norm() / want[:, :rows].norm())
        if error < (1e-4 if lm.dtype in (torch.float32, torch.float64) else 0.06):
            lm.why_not = "an encoder-decoder"
            return
    raise ModelError(f"{lm.config.model_type} ({lm.path!r}) is an encoder-decoder whose logits could not be reproduced from its "
                     f"decoder's states (off by {error:.1e})")
