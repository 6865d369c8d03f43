"""Public data sets -> sites' folders: one file a data set, named in one table."""

from feddp.data.prepare import endopolyp, fundus, lgg, prostate

PREPARE = {"lgg": lgg.prepare, "endopolyp": endopolyp.prepare, "fundus": fundus.prepare, "prostate": prostate.prepare}
