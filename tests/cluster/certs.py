"""A CA and certificates of it, made by openssl(1) for one test and gone with its folder."""
import shutil
import subprocess

from harness import Skip

KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]


def openssl(*args, **kw):
    subprocess.run(["openssl", *args], check=True, capture_output=True, text=True, **kw)


class Authority:
    def __init__(self, folder, name="ca"):
        if not shutil.which("openssl"):
            raise Skip("no openssl here to make certificates with")
        self.folder, self.ca = folder, f"{folder}/{name}.crt"
        openssl("req", "-x509", *KEY, "-keyout", f"{folder}/{name}.key", "-out", self.ca, "-days", "2", "-subj", f"/CN={name}",
                "-addext", "keyUsage=critical,keyCertSign")

    def certify(self, name, *addresses):
        """The three variables of Ray's for a node of these addresses."""
        at = f"{self.folder}/{name}"
        names = ",".join(f"{'IP' if a.replace('.', '').isdigit() or ':' in a else 'DNS'}:{a}" for a in addresses)
        openssl("req", *KEY, "-keyout", f"{at}.key", "-out", f"{at}.csr", "-subj", f"/CN={name}")
        openssl("x509", "-req", "-in", f"{at}.csr", "-CA", self.ca, "-CAkey", self.ca[:-3] + "key", "-CAcreateserial", "-days", "2",
                "-out", f"{at}.crt", "-extfile", "/dev/stdin", input=f"subjectAltName={names}\n")
        return {"RAY_USE_TLS": "1", "RAY_TLS_SERVER_CERT": f"{at}.crt", "RAY_TLS_SERVER_KEY": f"{at}.key", "RAY_TLS_CA_CERT": self.ca}
