"""Conversion of a run's weights into files of other programs. No ranks are started.

Importing it prepares megatron-core for the devices of this machine.
"""

from megaloom.runtime.megatron import device

device.prepare()
