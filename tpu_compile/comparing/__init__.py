"""Compiled against eager on the user's own model: run both, measure every tensor, find the first op that departs.

``runs`` runs a model and names what it leaves behind, ``measure`` compares two such tensors, ``interpreted`` runs the
graphs op by op in eager torch, ``bisection`` finds the op, ``reproducer`` writes it down as a program.
"""
