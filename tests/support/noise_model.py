"""A Truss model that returns images of noise, and refuses a request without a prompt."""

NOISE_MODEL = """
    import base64
    import io

    from PIL import Image
    from starlette.responses import JSONResponse

    class Model:
        async def predict(self, request):
            if "prompt" not in request:
                return JSONResponse({"error": "prompt: is missing"}, status_code=400)
            images = []
            for seed in range(request.get("num_images", 1)):
                file = io.BytesIO()
                Image.effect_noise((64, 64), 100 + seed).save(file, "JPEG")
                images.append({"data": base64.b64encode(file.getvalue()).decode(), "seed": seed})
            return {"status": "success", "data": images[0]["data"], "images": images}
"""
