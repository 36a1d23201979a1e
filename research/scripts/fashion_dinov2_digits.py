# Ran at commit 8550626, on the returned weights.
import torch, numpy as np, torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from sklearn.pipeline import make_pipeline
from sklearn.model_selection import StratifiedShuffleSplit
from layershuffle.models import load, host_of, image_view
from layershuffle.data.transforms import normalise
from layershuffle.policies import Sequential, Shuffled
from layershuffle.stack import running, depth_of
torch.set_num_threads(1)
d=load_digits(); x=torch.tensor(d.images/16.,dtype=torch.float32)[:,None]; y=d.target
x=F.interpolate(x,size=(56,56),mode="bicubic",antialias=True).clamp(0,1).expand(-1,3,-1,-1)
for name,path in (("untouched","data/fashion-dinov2/base"),("baseline","runs/fashion-dinov2/runs/baseline-seed0/fit"),("anyorder","runs/fashion-dinov2/runs/anyorder-seed0/fit")):
    m=load(f"dir:{path}").eval(); host=host_of(m); im=normalise(x,image_view(m))
    orders=[("sequential",Sequential().draw(12,seed=7,step=0))]
    if name=="anyorder": orders+=[(f"arbitrary {i}",Shuffled().draw(12,seed=7,step=i)) for i in range(2)]
    for label,o in orders:
        seen=[]
        with host.classifier.register_forward_pre_hook(lambda _,i: seen.append(i[0])), torch.no_grad(), running(m,o):
            for c in im.split(200): m(c)
        f=torch.cat(seen).numpy(); ks=[];ls=[]
        for tr,te in StratifiedShuffleSplit(5,test_size=597,random_state=0).split(f,y):
            g=f/np.linalg.norm(f,axis=1,keepdims=True)
            ks.append(100*KNeighborsClassifier(10).fit(g[tr],y[tr]).score(g[te],y[te]))
            ls.append(100*make_pipeline(StandardScaler(),LogisticRegression(C=0.01,max_iter=500)).fit(f[tr],y[tr]).score(f[te],y[te]))
        print(f"{name},{label},{np.mean(ks):.2f},{np.std(ks,ddof=1):.2f},{np.mean(ls):.2f},{np.std(ls,ddof=1):.2f}",flush=True)
