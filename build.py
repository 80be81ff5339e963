"""From the settings of a run to its method and networks."""

from types import SimpleNamespace

import torch

import models
from baselines import FSQ, PPO, RLOO, VQVAE, Gaussian, Relaxed
from daps import DAPS
from models import AutoregressiveEncoder, OnePassEncoder, Scale, Sizes, VectorEncoder
from motion import FeatureScale
from vocabulary import count_values


def daps(e, d, s):
    return DAPS(e, d, s.n_samples, s.ess_target, s.eta_update, s.centred)


METHODS = {  # the encoder, and the method from an encoder e, a decoder d and settings s
    "daps": (AutoregressiveEncoder, daps),
    "daps_na": (OnePassEncoder, daps),
    "gumbel": (AutoregressiveEncoder, lambda e, d, s: Relaxed(e, d, "gumbel")),
    "gumbel_na": (OnePassEncoder, lambda e, d, s: Relaxed(e, d, "gumbel")),
    "grmck": (AutoregressiveEncoder, lambda e, d, s: Relaxed(e, d, "grmck", s.mc_samples)),
    "grmck_na": (OnePassEncoder, lambda e, d, s: Relaxed(e, d, "grmck", s.mc_samples)),
    "reinmax_na": (OnePassEncoder, lambda e, d, s: Relaxed(e, d, "reinmax")),
    "rloo": (AutoregressiveEncoder, lambda e, d, s: RLOO(e, d, s.n_samples)),
    "rloo_na": (OnePassEncoder, lambda e, d, s: RLOO(e, d, s.n_samples)),
    "ppo": (AutoregressiveEncoder, lambda e, d, s: PPO(e, d, s.width, s.n_samples, s.ppo_epochs)),
    "vqvae": (VectorEncoder, lambda e, d, s: VQVAE(e, d, s.width, s.commitment, s.vq_ema)),
    "fsq": (VectorEncoder, lambda e, d, s: FSQ(e, d, fsq_levels(s), s.width)),
    "gaussian": (VectorEncoder, lambda e, d, s: Gaussian(e, d, s.width)),
}


def fsq_levels(s):
    """The numbers in the setting "8 8 4", or zeros; FSQ checks that their product is vocab_size."""
    return [int(word) if word.isdecimal() else 0 for word in s.fsq_levels.split()]


def build_model(settings, x_shape, scale=None):
    """The method and networks for a run's settings, freshly initialised. x_shape: of one x as the
    networks see it. scale: standardises x; without it, there is room for that of a checkpoint."""
    s, is_motion = SimpleNamespace(**settings), len(x_shape) == 2
    if scale is None:
        ones = torch.ones(x_shape[0], 1, 1)
        scale = FeatureScale.blank(*x_shape) if is_motion else Scale(0 * ones, ones)
    sizes = Sizes(tuple(x_shape), s.n_tokens, s.vocab_size, s.width, s.n_layers, s.mlp_ratio)
    make_encoder, make_method = METHODS[s.method]
    has_tokens = make_encoder is not VectorEncoder  # and so the decoder a table of vectors
    is_binary = not is_motion and x_shape[0] == 1
    window = s.credit_window if make_method is daps and not is_binary else 0
    if make_encoder is AutoregressiveEncoder:
        encoder = make_encoder(sizes, scale, window > 0, s.aligned)
    elif has_tokens:
        encoder = make_encoder(sizes, scale, window > 0)
    else:
        encoder = make_encoder(sizes, scale, len(fsq_levels(s)) if s.method == "fsq" else None)
        sizes.vocab_size = 0
    if is_binary:
        decoder = models.MLPDecoder(sizes)
    else:
        make_decoder = models.MotionDecoder if is_motion else models.ResNetDecoder
        decoder = make_decoder(sizes, scale, window)
    if s.split_interval and has_tokens:
        count_values(decoder)
    return make_method(encoder, decoder, s)
