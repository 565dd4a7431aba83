"""A peer with a proper connection to an arithmetic run that answers no lease, and sends batches of
wrong numbers under leases that it guesses.
"""

from __future__ import annotations

import random
import threading

import numpy as np
import zmq

from common.run.folder import RunFolder
from common.transport import messages, wire
from common.transport.address import ChannelError, Endpoint
from tests.support.arithmetic_maker import ArithmeticMaker

CAPACITY = 2
_SAY_S = 0.3


class Impostor(threading.Thread):
    """Joins whatever generation there is until `end`."""

    def __init__(self, run: RunFolder, seed: int):
        super().__init__(daemon=True)
        self._run, self._random = run, random.Random(seed)
        self._over = threading.Event()
        self._gen, self._maker, self._g = 0, None, 0
        self.leased = self.forged = 0
        self.start()

    def end(self) -> None:
        """Gone when this returns."""
        self._over.set()
        self.join(20)

    def run(self) -> None:
        context = zmq.Context()
        try:
            while not self._over.is_set():
                self._one_connection(context)
        finally:
            context.destroy(linger=0)

    def _one_connection(self, context: zmq.Context) -> None:
        try:
            endpoint = Endpoint.read(self._run.endpoint_file)
        except (OSError, ChannelError):
            endpoint = None
        if endpoint is None:
            self._over.wait(_SAY_S)
            return
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(endpoint.address)
        self._gen, silent = 0, 0
        while silent < 10 and not self._over.is_set():
            self._say(dealer, messages.Heartbeat(self._gen, "idle", self._gen > 0))
            silent += 1
            while dealer.poll(int(_SAY_S * 1000)):
                silent = 0
                self._hear(dealer, wire.decode(dealer.recv_multipart())[1])
                if self._over.is_set():
                    break
        dealer.close()

    def _say(self, dealer: zmq.Socket, message: messages.Message) -> None:
        try:
            dealer.send_multipart(wire.encode(self._run.run_id, message), zmq.NOBLOCK)
        except zmq.Again:
            return  # nobody is connected

    def _hear(self, dealer: zmq.Socket, message: messages.Message) -> None:
        if isinstance(message, messages.Welcome):
            self._gen = message.gen
            self._maker = ArithmeticMaker(self._run, message.offer.stage)
            hash_, probe = self._maker.feature_hash, self._maker.probe()
            self._say(dealer, messages.Ready(self._gen, "impostor", 1, CAPACITY, hash_, probe))
        elif isinstance(message, messages.Lease) and self._maker is not None:
            self.leased += 1
            self._forge(dealer, message.g)
        elif isinstance(message, messages.Stop):
            self._over.set()

    def _forge(self, dealer: zmq.Socket, g: int) -> None:
        """Batches beside the one that was leased here, with numbers that no producer sends."""
        for near in range(max(0, g - 2), g + 3):
            try:
                made = self._maker.make(self._maker.plan("train", near), [], [])
            except IndexError:
                continue
            made.arrays["value"] += np.where(made.arrays["weights"] > 0, 1, 0)
            lease = self._random.choice((near + 1, self._random.getrandbits(63)))
            digest = wire.digest(made.arrays)
            notes = messages.Notes()
            self._say(
                dealer,
                messages.Data(self._gen, "train", near, lease, digest, notes, made.arrays),
            )
            self.forged += 1
