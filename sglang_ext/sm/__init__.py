"""SM control: two streams on disjoint sets of TPCs, by stream masks or by green contexts, tested before use.

``planner`` says which TPCs each side gets, ``control`` what a way of control offers, ``smctrl`` and ``green`` are the
ways, ``self_test`` tries one on this GPU in a process of its own, and ``select`` chooses.
"""
