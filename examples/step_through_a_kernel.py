"""Run the kernel of a Hopper GPU in the simulator, and stop inside it. Needs no GPU.

    python examples/step_through_a_kernel.py          run it, compare with the golden model
    python -m pdb -c "b nvfp4/kernels/quantize.py:LINE" -c c examples/step_through_a_kernel.py
"""

import numpy as np

import nvfp4

x = np.linspace(-4, 4, 2 * 64, dtype=np.float32).reshape(2, 64)

golden = nvfp4.quantize(x, "nvfp4")
with nvfp4.simulate(arch="sm_90a"):
    # Every CUDA thread is a greenlet of this thread, so pdb stops where a kernel stops: put
    # breakpoint() into a kernel's file, or name a line as above, and print what you like.
    simulated = nvfp4.quantize(x, "nvfp4")

print("codes equal: ", np.array_equal(np.asarray(golden.codes), np.asarray(simulated.codes)))
print("scales equal:", np.array_equal(np.asarray(golden.scales), np.asarray(simulated.scales)))
