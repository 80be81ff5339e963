"""FID (Heusel et al. 2017): the distance between Gaussians fitted to Inception features of images.

    inception = load_inception("~/.cache/daps/pt_inception-2015-12-05-6726825d.pth", "cpu")
    a, b = (image_moments(inception, batches) for batches in (batches_a, batches_b))
    distance = frechet_distance(*a, *b)

Batches are images (N, 3, height, width) in [0, 1], on the network's device. Needs only torch.
"""

import hashlib
import os

import torch
import torch.nn.functional as F
from torch import nn

FID_WEIGHTS = "pt_inception-2015-12-05-6726825d.pth"
FID_URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{FID_WEIGHTS}"
FID_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"


class Conv(nn.Module):
    """Convolution, BatchNorm, ReLU."""

    def __init__(self, n_in, n_out, kernel, stride=1, padding=0):
        super().__init__()
        self.conv = nn.Conv2d(n_in, n_out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(n_out, eps=1e-3)

    def forward(self, h):
        return self.bn(self.conv(h)).relu()


class Mixed(nn.Module):
    """Parallel branches of convolutions and one that pools, concatenated along channels.

    branches  layers by the name of their branch: (channels, kernel height, kernel width), where
              (channels, "fork") is a 1 x 3 and a 3 x 1 convolution of the same input; if pooling
              has stride 2, so has the last layer of each, without padding
    n_pool    channels after a 1 x 1 convolution of what was pooled; 0: as they are
    """

    def __init__(self, n_in, n_pool, pool, **branches):
        super().__init__()
        self.branches = []  # the names of each branch's layers; a fork has two
        for branch, layers in branches.items():
            n, names = n_in, []
            for i, (n_out, *kernel) in enumerate(layers, 1):
                name = f"{branch}_{i}" if len(layers) > 1 else branch
                kernels = {name: kernel}
                if kernel == ["fork"]:  # only the last layer of a branch can be one
                    kernels = {f"{name}a": (1, 3), f"{name}b": (3, 1)}
                for key, (h, w) in kernels.items():
                    down = pool.stride == 2 and i == len(layers)
                    padding = 0 if down else (h // 2, w // 2)
                    self.add_module(key, Conv(n, n_out, (h, w), 1 + down, padding))
                names.append(list(kernels))
                n = n_out
            self.branches.append(names)
        self.pool, self.branch_pool = pool, Conv(n_in, n_pool, 1) if n_pool else nn.Identity()

    def forward(self, h):
        outputs = []
        for names in self.branches:
            last = [h]
            for keys in names:
                last = [self.get_submodule(key)(last[0]) for key in keys]
            outputs += last
        return torch.cat([*outputs, self.branch_pool(self.pool(h))], dim=1)


class Inception(nn.Module):
    """Inception-v3 as FID uses it: the network of TensorFlow's 2015 release, with the names of the
    published weights. It differs from torchvision's in its pooling."""

    def __init__(self):
        super().__init__()
        average = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
        maximum, halve = nn.MaxPool2d(3, stride=1, padding=1), nn.MaxPool2d(3, stride=2)
        double = [(64, 1, 1), (96, 3, 3), (96, 3, 3)]

        def mixed_5(n_in, n_pool):
            one, five = [(64, 1, 1)], [(48, 1, 1), (64, 5, 5)]
            branches = dict(branch1x1=one, branch5x5=five, branch3x3dbl=double)
            return Mixed(n_in, n_pool, average, **branches)

        def mixed_6(n):
            seven = [(n, 1, 1), (n, 1, 7), (192, 7, 1)]
            twice = [(n, 1, 1), (n, 7, 1), (n, 1, 7), (n, 7, 1), (192, 1, 7)]
            branches = dict(branch1x1=[(192, 1, 1)], branch7x7=seven, branch7x7dbl=twice)
            return Mixed(768, 192, average, **branches)

        def mixed_7(n_in, pool):
            three, twice = [(384, 1, 1), (384, "fork")], [(448, 1, 1), (384, 3, 3), (384, "fork")]
            branches = dict(branch1x1=[(320, 1, 1)], branch3x3=three, branch3x3dbl=twice)
            return Mixed(n_in, 192, pool, **branches)

        self.Conv2d_1a_3x3 = Conv(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = Conv(32, 32, 3)
        self.Conv2d_2b_3x3 = Conv(32, 64, 3, padding=1)
        self.Conv2d_3b_1x1 = Conv(64, 80, 1)
        self.Conv2d_4a_3x3 = Conv(80, 192, 3)
        self.Mixed_5b, self.Mixed_5c = mixed_5(192, 32), mixed_5(256, 64)
        self.Mixed_5d = mixed_5(288, 64)
        self.Mixed_6a = Mixed(288, 0, halve, branch3x3=[(384, 3, 3)], branch3x3dbl=double)
        self.Mixed_6b, self.Mixed_6c = mixed_6(128), mixed_6(160)
        self.Mixed_6d, self.Mixed_6e = mixed_6(160), mixed_6(192)
        three, seven = [(192, 1, 1), (320, 3, 3)], [(192, 1, 1), (192, 1, 7), (192, 7, 1)]
        self.Mixed_7a = Mixed(768, 0, halve, branch3x3=three, branch7x7x3=[*seven, (192, 3, 3)])
        self.Mixed_7b, self.Mixed_7c = mixed_7(1280, average), mixed_7(2048, maximum)
        self.fc = nn.Linear(2048, 1008)  # in the file, but not used

    def forward(self, images):
        """Images (N, 3, height, width) in [0, 1] -> pool3 features (N, 2048)."""
        h = 2 * F.interpolate(images, size=(299, 299), mode="bilinear") - 1
        for name, module in self.named_children():
            if name in ("Conv2d_3b_1x1", "Mixed_5b"):
                h = F.max_pool2d(h, 3, stride=2)
            if name != "fc":
                h = module(h)
        return h.mean(dim=(2, 3))


def load_inception(path, device):
    """The network with its published weights; OSError if path is any other file."""
    inception = Inception()
    with open(os.path.expanduser(path), "rb") as file:
        if hashlib.sha256(file.read()).hexdigest() != FID_SHA256:
            raise OSError(0, f"not the published file; get {FID_URL}", path)
        file.seek(0)
        inception.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    return inception.to(device).eval().requires_grad_(False)


@torch.no_grad()
def image_moments(inception, batches):
    """Mean (D,), unbiased covariance (D, D) of features of images in [0, 1], rounded to 8 bits."""
    n, total, outer = 0, 0.0, 0.0
    for images in batches:
        f = inception((images.clamp(0, 1) * 255).round() / 255).double().cpu()  # (N, D)
        n, total, outer = n + len(f), total + f.sum(dim=0), outer + f.T @ f
    mean = total / n
    return mean, (outer - n * torch.outer(mean, mean)) / max(n - 1, 1)


def frechet_distance(mean_a, cov_a, mean_b, cov_b):
    """Squared Frechet distance between two Gaussians,
    |mean_a - mean_b|^2 + tr(cov_a + cov_b - 2 (cov_a cov_b)^(1/2)).

    With A the root of cov_a, the root of A cov_b A has the same trace. Both matrices are symmetric,
    so their eigenvalues give the roots: real, and stable even if a covariance is singular.
    """
    values, vectors = torch.linalg.eigh(cov_a)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    values = torch.linalg.eigvalsh(root @ cov_b @ root)
    trace = cov_a.trace() + cov_b.trace() - 2 * values.clamp_min(0).sqrt().sum()
    return ((mean_a - mean_b).square().sum() + trace).item()
