"""Image classification: transfer learning with Accelerate and timm, as Accelerate's tutorial on pets has it.

Run it as ``python -m manycpu.pipeline.recipes.image_classification``; it takes the options that users of
``complete_cv_example.py`` know, has the tutorial's settings as defaults, and finds its images, model and
folders in the environment of a run.
"""
