"""Images as people have them: pictures, NIfTI volumes and DICOM series, each read into a `Scan`; masks of any of these."""
