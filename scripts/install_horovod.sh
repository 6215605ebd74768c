#!/bin/sh
# Install Horovod for the torch of a Python environment: scripts/install_horovod.sh [python]
#
# Its last release comes as source and predates today's torch, so the C++ standard is raised. The
# wheel is kept in ~/.cache/kfac_bench/wheels and used again. Messages go over gloo and tensors must
# be on CPUs; HVD_CUDA=1 builds it for GPUs and NCCL (needs nvcc and NCCL's headers;
# HOROVOD_CUDA_HOME and HOROVOD_NCCL_HOME say where they are). Needs a C++ compiler, cmake, make.
set -eu
VERSION=0.28.1
unset CDPATH  # with it, cd prints a path
HERE=$(cd "$(dirname "$0")" && pwd)
PY=$(command -v "${1:-python3}") || { echo "install_horovod: no ${1:-python3} here" >&2; exit 2; }
PY=$(cd "$(dirname "$PY")" && pwd)/$(basename "$PY")
pip() { "$PY" -m pip --disable-pip-version-check "$@"; }

for tool in c++ cmake make; do
  command -v $tool >/dev/null || { echo "install_horovod: building it needs $tool" >&2; exit 2; }
done
pip install -q -c "$HERE/../constraints.txt" setuptools wheel packaging cloudpickle psutil pyyaml cffi

TORCH=$("$PY" -c 'import torch; print(torch.__version__)')
TAG=$("$PY" -c 'import sys, sysconfig; print(sys.implementation.cache_tag, sysconfig.get_platform())')
SELF=$(sha256sum "$HERE/install_horovod.sh" | cut -c 1-12)
if [ -n "${HVD_CUDA:-}" ]; then CUDA=True; export HOROVOD_GPU_OPERATIONS=NCCL; else CUDA=False; fi
KEY=$(echo "$VERSION torch-$TORCH $TAG cuda-$CUDA $SELF" | tr ' ' _)
KEPT=$(realpath -m "${XDG_CACHE_HOME:-$HOME/.cache}")/kfac_bench/wheels/$KEY

if ! ls "$KEPT"/horovod-*.whl >/dev/null 2>&1; then
  echo "building Horovod $VERSION for torch $TORCH: 3 to 5 minutes on two cores, once"
  WORK=$(mktemp -d)
  trap 'rm -rf "$WORK"' EXIT
  pip download -q --no-deps --no-build-isolation --no-binary horovod -d "$WORK" horovod==$VERSION
  tar -xzf "$WORK"/horovod-$VERSION.tar.gz -C "$WORK"
  cd "$WORK"/horovod-$VERSION
  STD=$("$PY" -c 'import torch; print(20 if torch.torch_version.TorchVersion(torch.__version__) >= (2, 14) else 17)')
  sed -i "s/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD $STD/" CMakeLists.txt horovod/torch/CMakeLists.txt
  sed -i "s/-std=c++11/-std=c++$STD/" third_party/gloo/CMakeLists.txt
  # Horovod replaces -O2 by -O3 and keeps -g: the build then takes a third longer
  sed -i 's/"-O2" "-O3" CMAKE_CXX/"-O2 -g" "-O2" CMAKE_CXX/' CMakeLists.txt
  # as it is: for GPUs wherever torch is a CUDA build and nvcc is there
  sed -i "s/(torch.version.cuda is not None) and (CUDA_HOME is not None)/$CUDA/" \
    cmake/Modules/FindPytorch.cmake
  export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1
  export HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 CMAKE_POLICY_VERSION_MINIMUM=3.5
  MAKEFLAGS="-j$(nproc)"
  export MAKEFLAGS
  pip wheel -q --no-build-isolation --no-deps -w "$WORK/wheel" . >"$WORK/log" 2>&1 || {
    tail -n 60 "$WORK/log" >&2
    echo "install_horovod: the build failed; its last lines are above" >&2
    exit 1
  }
  mkdir -p "$(dirname "$KEPT")"
  mv -T "$WORK/wheel" "$KEPT.$$"  # two builds at once: the second to end replaces nothing
  mv -T "$KEPT.$$" "$KEPT" 2>/dev/null || rm -rf "$KEPT.$$"
  cd "$HERE"
fi
pip install -q --no-deps --force-reinstall "$KEPT"/horovod-*.whl
"$PY" -c 'import horovod.torch as hvd; hvd.init(); assert hvd.gloo_built(); print("Horovod", "'$VERSION'", "is ready")'
