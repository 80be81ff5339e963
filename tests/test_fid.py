"""FID against scipy's matrix root and an independent definition of Inception."""

import hashlib
import importlib.util
import os
import sys
import types

import pytest
import scipy.linalg
import torch

import data
import fid
from eval import fid_score, validation_noise
from fid import Inception, frechet_distance, image_moments, load_inception


def gaussian(dim, rank=None, seed=0):
    """A mean and a covariance, singular if rank < dim, in float64."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(dim, rank or dim, generator=generator, dtype=torch.float64)
    return torch.randn(dim, generator=generator, dtype=torch.float64), root @ root.T


@pytest.mark.parametrize("rank", (40, 60, 15), ids=("full", "more than full", "singular"))
def test_the_distance_agrees_with_scipy(rank):
    (m_a, c_a), (m_b, c_b) = gaussian(40, rank, 0), gaussian(40, rank, 1)
    jitter = 1e-10 * torch.eye(40, dtype=torch.float64)  # scipy needs it where ours does not
    root = scipy.linalg.sqrtm(((c_a + jitter) @ (c_b + jitter)).numpy())
    theirs = (m_a - m_b).square().sum() + c_a.trace() + c_b.trace() - 2 * root.trace().real
    assert frechet_distance(m_a, c_a, m_b, c_b) == pytest.approx(theirs.item(), rel=1e-4)
    assert frechet_distance(m_b, c_b, m_a, c_a) == pytest.approx(theirs.item(), rel=1e-4)


@pytest.fixture(scope="module")
def random_weights(tmp_path_factory):
    """A file like the published one, with random weights that keep activations alive."""
    torch.manual_seed(0)
    state = Inception().state_dict()
    for name, t in state.items():
        if t.dim() == 4:
            t.normal_(std=(2 / t[0].numel()) ** 0.5)
        elif name.endswith("running_var"):
            t.uniform_(0.5, 1.5)
        elif name.endswith(("bn.bias", "running_mean")):
            t.normal_(std=0.25)
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save(state, path)
    return path


def test_inception_has_the_names_shapes_and_activations_of_an_independent_definition(
    random_weights, monkeypatch
):
    """torch-fidelity's, without its package's imports: torchvision and its binaries."""
    package = types.ModuleType("torch_fidelity")
    origin = importlib.util.find_spec("torch_fidelity").origin
    package.__path__ = [os.path.dirname(origin)]
    monkeypatch.setitem(sys.modules, "torch_fidelity", package)
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    theirs = FeatureExtractorInceptionV3("inception", ["2048"], str(random_weights))
    network = Inception()
    shapes = {name: tuple(t.shape) for name, t in network.state_dict().items()}
    assert shapes == {name: tuple(t.shape) for name, t in theirs.state_dict().items()}
    network.load_state_dict(torch.load(random_weights, weights_only=True))
    network.eval()
    pixels = torch.randint(256, (2, 3, 299, 299), dtype=torch.uint8)
    with torch.no_grad():
        ours = network(pixels / 256)  # theirs maps 128 to 0, as TensorFlow did; ours 127.5
        (expected,) = theirs(pixels)
    assert ours.shape == (2, 2048) and ours.std() > 0.01
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_weights_that_are_not_the_published_ones_are_refused(random_weights, monkeypatch):
    assert fid.FID_WEIGHTS.endswith(f"-{fid.FID_SHA256[:8]}.pth")
    with pytest.raises(OSError, match="not the published file; get https") as caught:
        load_inception(random_weights, "cpu")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(fid, "FID_SHA256", hashlib.sha256(random_weights.read_bytes()).hexdigest())
    inception = load_inception(random_weights, "cpu")
    assert inception(torch.rand(1, 3, 32, 32)).shape == (1, 2048) and not inception.training


def few_features(images):
    """Replaces Inception: six features, so that 60 images are enough."""
    return images.flatten(1) @ torch.linspace(-1, 1, 192 * 6).view(192, 6).to(images.dtype)


def test_fid_is_of_reconstructions_and_keeps_the_moments_of_the_images(tmp_path, monkeypatch):
    """The model's code is x itself, which it decodes with an error."""
    monkeypatch.setattr(data, "CACHE_DIR", str(tmp_path))
    x, y = torch.randint(256, (70, 3, 8, 8)).byte(), torch.zeros(70).byte()
    images = data.ArrayDataset("cifar10", x[:10], y[:10], x[10:], y[10:])
    noises, seen, distances = [], [], []
    model = types.SimpleNamespace(encoder=types.SimpleNamespace(n_tokens=2), discrete=True)
    model.has_kl = False
    model.encode = lambda x, noise: (noises.append(noise), x)[1]
    for error in (0.0, 0.2, 0.5):
        model.decode = lambda z, error=error: types.SimpleNamespace(mean=z * (1 - error))
        features = lambda images: (seen.append(len(images)), few_features(images))[1]  # noqa: E731
        distances.append(fid_score(model, images, features, "cpu"))
    assert abs(distances[0]) < 1e-3 and distances[0] + 1e-3 < distances[1] < distances[2]
    assert sum(seen) == 60 * 4  # the images themselves are seen once
    assert torch.equal(noises[0], validation_noise(model, torch.arange(60), "cpu"))


def test_moments_of_images_in_batches_are_those_of_what_8_bit_files_would_hold():
    images = torch.rand(30, 3, 8, 8).double() * 1.4 - 0.2  # a decoder's mean may leave [0, 1]
    features = few_features((images.clamp(0, 1) * 255).round() / 255) + 50
    mean, cov = image_moments(lambda part: few_features(part) + 50, images.split(13))
    torch.testing.assert_close(mean, features.mean(dim=0))
    torch.testing.assert_close(cov, torch.cov(features.T))
